"""Sweeps over editors with Ray Tune."""
