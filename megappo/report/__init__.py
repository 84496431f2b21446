"""`megappo report`: a run's folder as one HTML file that needs no network."""
