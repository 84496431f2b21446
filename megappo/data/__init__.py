"""From Parquet rows to the token ids of a step, and from samples to micro-batches.

`prompts` reads rows, `render` turns a row into ids, `sampler` decides which rows a step takes,
`batching` splits what came back by tokens. Preparing data sets: `gsm8k`, `arithmetic`. No
communication happens here: what must agree between ranks follows from files and seeds alone.
"""
