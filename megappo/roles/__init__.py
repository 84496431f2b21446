"""What the models are for: actor, critic and reference, each a forward call and its loss."""
