"""Training on given answers: reward models and supervised fine-tuning, one loop for both."""
