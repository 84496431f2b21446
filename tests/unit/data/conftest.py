"""Tiny real tokenizers: one id a byte, so that lengths can be counted by hand, and chat markers."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MARKERS = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(*, adds_bos=False, adds_eos=False, template=TEMPLATE):
    """A tokenizer with BOS `<s>`; `adds_bos` and `adds_eos` say what it does to plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(MARKERS)
    if adds_bos or adds_eos:
        core.post_processor = processors.TemplateProcessing(
            single=("<s> " if adds_bos else "") + "$A" + (" </s>" if adds_eos else ""),
            special_tokens=[(m, core.token_to_id(m)) for m in ("<s>", "</s>")],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template
    )


@pytest.fixture(scope="session")
def tokenizer():
    """Like Qwen: no BOS anywhere."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def bos_tokenizer():
    """Like Llama: the tokenizer adds BOS to plain text, and the template writes one too."""
    return byte_tokenizer(adds_bos=True, template="{{ bos_token }}" + TEMPLATE)


@pytest.fixture(scope="session")
def make_tokenizer():
    return byte_tokenizer
