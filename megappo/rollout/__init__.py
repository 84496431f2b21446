"""Generation of responses: the engine protocol, SGLang behind it, and the push of new weights.

Nothing is imported here: SGLang's child processes load two plug-ins from this package
(`sglang_platform`, `sglang_seeds`) and must not pay for the trainer's imports.
"""
