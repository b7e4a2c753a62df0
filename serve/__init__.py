"""An editing endpoint with Ray Serve; nothing here yet."""
