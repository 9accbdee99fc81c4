"""The ClientApp: local training, local scoring, and what may leave a site."""
