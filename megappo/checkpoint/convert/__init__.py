"""Hugging Face <-> Megatron, both ways, a tensor at a time, without ranks and without a model.

    place           what lies at a path
    hf_source       reads a Hugging Face folder       hf_writer          writes one
    torch_dist_*    reads and writes dist_checkpointing's format; dcp_format is its two pickles
    legacy_source   reads Megatron's files a rank
    disk_names      under which names a parameter stands; checkpoint joins all sources
    to_megatron, to_hf, verify, inspect: what the commands do; command is their arguments
    rules           what --dtype spares, what is dropped   megatron_arguments  for common.pt
    output          how a folder appears              workers            several processes
    load_model      fills a Megatron model by Megatron's own loader; logits compares with it

The table of names is `models.name_map`, which training and the engines' weights use too, so a model
family needs nothing here.
"""
