import numpy as np
import pyarrow as pa
import pytest

from megappo.data.render import fit, render, to_plain
from megappo.errors import DataError, UserError

HELLO = [{"role": "user", "content": "hi"}]
CHATS = [
    [{"role": "user", "content": "what is 2+2?"}],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "sunny"},
    ],
]


def text_of(ids, tokenizer):
    return tokenizer.decode(ids)


# Plain values.


def test_chats_with_ragged_turns_survive_arrow_unchanged():
    table = pa.Table.from_pylist([{"prompt": chat} for chat in CHATS])
    assert table.to_pylist()[0]["prompt"][0]["tool_calls"] is None, "Arrow adds the key"
    assert [to_plain(row["prompt"]) for row in table.to_pylist()] == CHATS
    assert [to_plain(cell) for cell in table.column("prompt")] == CHATS
    assert to_plain(table.column("prompt")) == CHATS


def test_chats_survive_pandas_style_object_arrays_unchanged():
    cell = np.empty(3, dtype=object)
    cell[:] = CHATS[1]
    assert to_plain(cell) == CHATS[1]
    one_turn = np.array(CHATS[0], dtype=object)
    assert to_plain({"prompt": one_turn}) == {"prompt": CHATS[0]}


def test_numpy_scalars_become_python_scalars():
    plain = to_plain(
        {"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True), "d": np.str_("x")}
    )
    assert plain == {"a": 3, "b": 0.5, "c": True, "d": "x"}
    assert [type(v) for v in plain.values()] == [int, float, bool, str]


def test_none_is_dropped_from_dicts_and_kept_in_lists():
    assert to_plain({"a": None, "b": [None, {"c": None}]}) == {"b": [None, {}]}


def test_arrow_maps_become_dicts():
    cell = pa.array([[("a", 1)]], type=pa.map_(pa.string(), pa.int64()))
    assert to_plain(cell) == [{"a": 1}]


# Rendering.


def test_a_chat_without_bos_renders_to_the_ids_of_the_template(tokenizer):
    ids = render(HELLO, tokenizer, where="row 0")
    user, assistant, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|end|>"])
    h, i = tokenizer.convert_tokens_to_ids(["h", "i"])
    assert ids == [user, h, i, end, assistant]


def test_a_template_that_writes_bos_gives_exactly_one(bos_tokenizer):
    bos = bos_tokenizer.bos_token_id
    text = bos_tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert bos_tokenizer.encode(text)[:2] == [bos, bos], "encoding it plainly doubles BOS"
    ids = render(HELLO, bos_tokenizer, where="row 0")
    assert ids.count(bos) == 1
    assert ids[0] == bos
    assert text_of(ids, bos_tokenizer) == "<s><|user|>hi<|end|><|assistant|>"


def test_a_template_that_forgets_bos_gets_the_one_that_the_model_has(make_tokenizer):
    ids = render(HELLO, make_tokenizer(adds_bos=True), where="row 0")
    assert text_of(ids, make_tokenizer()) == "<s><|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("adds_bos", "text", "expected"),
    [
        (False, "hi", "hi"),
        (True, "hi", "<s>hi"),
        (True, "<s>hi", "<s>hi"),
        (False, "<s>hi", "<s>hi"),
        (True, "", "<s>"),
    ],
)
def test_plain_text_has_one_bos_if_any(make_tokenizer, adds_bos, text, expected):
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    assert text_of(render(text, tokenizer, where="row 0"), tokenizer) == expected


def test_no_eos_is_appended_to_a_prompt(make_tokenizer):
    tokenizer = make_tokenizer(adds_bos=True, adds_eos=True)
    assert text_of(tokenizer.encode("hi"), tokenizer) == "<s>hi</s>"
    assert text_of(render("hi", tokenizer, where="row 0"), tokenizer) == "<s>hi"


def test_text_parts_are_joined(tokenizer):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    cell = [{"role": "user", "content": parts}]
    assert render(cell, tokenizer, where="row 0") == render(HELLO, tokenizer, where="row 0")


def test_a_part_that_is_not_text_is_refused_by_name(tokenizer):
    cell = [HELLO[0], {"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    with pytest.raises(DataError, match=r"row 7, message 1: only text parts.*'image'"):
        render(cell, tokenizer, where="row 7")


@pytest.mark.parametrize("cell", [None, 3, [], {"role": "user"}])
def test_a_cell_that_is_neither_text_nor_messages_is_refused(tokenizer, cell):
    with pytest.raises(DataError, match="row 7: a prompt must be text or a non-empty list"):
        render(cell, tokenizer, where="row 7")


@pytest.mark.parametrize("message", ["hi", {"content": "hi"}, {"role": "user", "content": 3}])
def test_a_malformed_message_is_refused_with_its_place(tokenizer, message):
    with pytest.raises(DataError, match="row 7, message 0: "):
        render([message], tokenizer, where="row 7")


def test_a_prompt_without_tokens_is_refused(tokenizer):
    with pytest.raises(DataError, match="row 7: the prompt has no tokens"):
        render("", tokenizer, where="row 7")


def test_messages_without_a_chat_template_are_refused(make_tokenizer):
    with pytest.raises(DataError, match="row 7: a list of messages needs a chat template"):
        render(HELLO, make_tokenizer(template=None), where="row 7")


def test_messages_that_the_template_refuses_are_named(make_tokenizer):
    tokenizer = make_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"row 7: .*roles: user, user.*roles must alternate"):
        render(HELLO * 2, tokenizer, where="row 7")


def test_tools_reach_the_template_and_count(make_tokenizer):
    tokenizer = make_tokenizer(template="{{ tools | length }}{{ messages[0].content }}")
    ids = render(HELLO, tokenizer, where="row 0", template_args={"tools": [{"name": "a"}]})
    assert text_of(ids, tokenizer) == "1hi"


# Limits, on the final ids.


def test_a_prompt_of_558_tokens_is_cut_to_the_last_512(tokenizer):
    # 555 bytes and three markers.
    ids = render([{"role": "user", "content": "x" * 555}], tokenizer, where="row 0")
    assert len(ids) == 558
    cut = fit(ids, max_length=512, truncation="left", where="row 0")
    end, header = tokenizer.convert_tokens_to_ids(["<|end|>", "<|assistant|>"])
    assert len(cut) == 512
    assert cut == ids[46:]
    assert cut[-2:] == [end, header]


def test_a_prompt_over_the_limit_is_dropped_or_named():
    ids = list(range(558))
    assert fit(ids, max_length=512, truncation="drop", where="row 3") is None
    with pytest.raises(DataError, match=r"row 3: the prompt has 558 tokens.*512"):
        fit(ids, max_length=512, truncation="error", where="row 3")


@pytest.mark.parametrize("truncation", ["error", "left", "drop"])
def test_a_prompt_at_the_limit_is_left_alone(truncation):
    assert fit([1, 2, 3], max_length=3, truncation=truncation, where="row 0") == [1, 2, 3]


def test_unknown_truncations_and_empty_limits_are_refused():
    with pytest.raises(UserError, match=r"'lef'.*did you mean 'left'.*error, left, drop"):
        fit([1], max_length=1, truncation="lef", where="row 0")
    with pytest.raises(UserError, match="at least 1 token, not 0"):
        fit([1], max_length=0, truncation="left", where="row 0")
