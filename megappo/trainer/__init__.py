"""The training loop: `ppo_trainer` is the algorithm, `build` puts the parts together."""
