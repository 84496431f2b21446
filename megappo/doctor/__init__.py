"""`megappo doctor`: what a machine has, what a run needs of it, and how to get what is missing."""
