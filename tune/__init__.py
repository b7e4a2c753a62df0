"""Sweeps over editors with Ray Tune; nothing here yet."""
