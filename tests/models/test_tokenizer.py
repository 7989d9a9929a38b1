"""Where an answer ends, how a prompt begins, and what an unknown character does."""

from __future__ import annotations

import pytest

from quintet.models.config import ModelConfig
from quintet.models.loader import load_tokenizer
from quintet.models.tokenizer import PromptEncoder, Tokenizer
from quintet.types import QuintetError
from tests.models.helpers import chat_tokenizer, load_cases, small_config

CASES = load_cases()
HELLO = [{"role": "user", "content": "hello"}]
HELLO_ID = chat_tokenizer().convert_tokens_to_ids("hello")


@pytest.mark.parametrize("adds_bos", [True, False])
def test_exactly_one_bos_after_a_chat_template_that_writes_one(adds_bos: bool) -> None:
    case = CASES["ROL11"]
    ids = Tokenizer(chat_tokenizer(adds_bos=adds_bos)).encode_chat(HELLO)
    assert ids == [case["input"]["bos_id"], 3, HELLO_ID, 6, 4]


def test_bos_is_put_in_front_where_the_tokenizer_does_and_the_template_does_not() -> None:
    without = "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|eot|>{% endfor %}"
    assert Tokenizer(chat_tokenizer(template=without)).encode_chat(HELLO) == [1, 3, HELLO_ID, 6]
    assert Tokenizer(chat_tokenizer(template=without, adds_bos=False)).encode_chat(HELLO) == [3, HELLO_ID, 6]


def test_plain_prompt_gets_one_bos_even_when_its_text_has_one() -> None:
    tokenizer = Tokenizer(chat_tokenizer())
    assert tokenizer.encode("hello") == [HELLO_ID]
    assert tokenizer.encode_plain("hello") == tokenizer.encode_plain("<s> hello") == [1, HELLO_ID]


def test_all_declared_end_ids_are_collected_with_the_end_of_turn_first() -> None:
    assert Tokenizer(chat_tokenizer(), stop_ids=(2, 7)).eos_ids == (6, 2, 7)
    assert Tokenizer(chat_tokenizer(template=None), stop_ids=(2, 7)).eos_ids == (2, 7)
    assert Tokenizer(chat_tokenizer(), uses_chat_template=False).eos_ids == (2,)


def test_what_follows_an_answer_is_the_templates_end_of_turn_the_new_messages_and_the_next_head() -> None:
    tokenizer = Tokenizer(chat_tokenizer())
    chat = [*HELLO, {"role": "assistant", "content": "w1 w2"}, {"role": "user", "content": "hello"}]
    assert tokenizer.encode_after(chat, 1, ended=False) == [6, 3, HELLO_ID, 6, 4]
    assert tokenizer.encode_after(chat, 1, ended=True) == [3, HELLO_ID, 6, 4]  # its end id was sampled already
    w1, w2 = tokenizer.encode("w1 w2")
    assert [*tokenizer.encode_chat(HELLO), w1, w2, *tokenizer.encode_after(chat, 1, ended=False)] == (
        tokenizer.encode_chat(chat)
    )
    # what the answer says does not matter: it is never encoded
    other = [chat[0], {"role": "assistant", "content": None, "tool_calls": []}, chat[2]]
    assert tokenizer.encode_after(other, 1, ended=True) == tokenizer.encode_after(chat, 1, ended=True)


def test_a_template_that_rewrites_old_answers_still_gives_what_follows_them() -> None:
    """As templates do that leave thinking out of earlier turns."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|> {% if m.role == 'assistant' and not loop.last %}w9 {% endif %}"
        "{{ m.content }} <|eot|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = Tokenizer(chat_tokenizer(template=template))
    chat = [*HELLO, {"role": "assistant", "content": "w1"}, {"role": "user", "content": "w2"}]
    assert tokenizer.encode_after(chat, 1, ended=True) == [3, tokenizer.encode("w2")[0], 6, 4]


def test_a_template_that_hides_answers_cannot_be_continued() -> None:
    template = "{% for m in messages if m.role == 'user' %}<|user|> {{ m.content }} <|eot|>{% endfor %}"
    tokenizer = Tokenizer(chat_tokenizer(template=template), uses_chat_template=False)
    chat = [*HELLO, {"role": "assistant", "content": "w1"}, *HELLO]
    with pytest.raises(QuintetError, match="exactly once"):
        tokenizer.encode_after(chat, 1, ended=True)


def test_eos_changed_by_the_user_is_an_end_id() -> None:
    """ROL17."""
    changed = CASES["ROL17"]["input"]["tokenizer_eos_changed_by_user"]
    tokenizer = Tokenizer(chat_tokenizer(template=None))
    tokenizer.hf.eos_token = tokenizer.hf.convert_ids_to_tokens(changed)
    assert tokenizer.eos_ids == (changed,)


def test_missing_pad_token_falls_back_to_eos_without_a_new_id() -> None:
    hf = chat_tokenizer(template=None)
    before = len(hf)
    assert hf.pad_token_id is None
    assert Tokenizer(hf).pad_id == 2
    assert len(hf) == before


def test_no_eos_at_all_is_refused() -> None:
    hf = chat_tokenizer(template=None)
    hf.eos_token = None
    with pytest.raises(QuintetError, match="no EOS token"):
        Tokenizer(hf, name="some/model")


def test_conversation_that_ends_with_the_assistant_is_continued() -> None:
    ids = Tokenizer(chat_tokenizer()).encode_chat([*HELLO, {"role": "assistant", "content": "w1"}])
    assert ids[-2:] == [4, chat_tokenizer().convert_tokens_to_ids("w1")]


def test_system_prompt_and_template_arguments_reach_the_ids() -> None:
    tokenizer = Tokenizer(chat_tokenizer())
    config = ModelConfig(name="some/model", system_prompt="w9", chat_template_kwargs={"shout": True})
    w9, loud = (tokenizer.hf.convert_tokens_to_ids(word) for word in ("w9", "LOUD"))
    encode = PromptEncoder(tokenizer, config)
    expected = [1, 5, w9, 6, 3, HELLO_ID, 6, loud, 4]
    assert encode(None, "hello") == encode(HELLO, None) == expected
    own = [{"role": "system", "content": "w1"}, *HELLO]
    assert w9 not in encode(own, None)


def test_chat_template_is_used_unless_refused() -> None:
    tokenizer = Tokenizer(chat_tokenizer())
    assert PromptEncoder(tokenizer, ModelConfig(name="m"))(None, "hello") == [1, 3, HELLO_ID, 6, 4]
    assert PromptEncoder(tokenizer, ModelConfig(name="m", use_chat_template=False))(None, "hello") == [1, HELLO_ID]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_chat_template": True}, "use_chat_template is true, but"),
        ({"system_prompt": "be brief"}, "system_prompt has no effect"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs has no effect"),
    ],
)
def test_template_options_without_a_template_are_refused(options: dict[str, object], message: str) -> None:
    config = small_config(**options)
    with pytest.raises(QuintetError, match=message):
        PromptEncoder(load_tokenizer(config), config)


def test_messages_without_a_template_are_refused() -> None:
    config = small_config()
    with pytest.raises(QuintetError, match="chat messages, but no chat template"):
        PromptEncoder(load_tokenizer(config), config)(HELLO, None)


def test_template_that_cannot_render_is_named() -> None:
    tokenizer = Tokenizer(
        chat_tokenizer(template="{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}x")
    )
    with pytest.raises(QuintetError, match="no tools"):
        tokenizer.encode_chat([{"role": "tool", "content": "1"}])


def test_tiny_tokenizer_is_one_token_a_character_and_keeps_spaces() -> None:
    tokenizer = load_tokenizer(small_config())
    text = "37 + 58 = ?."
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, *tokenizer.eos_ids]) == text
    assert (tokenizer.pad_id, tokenizer.eos_ids, tokenizer.bos_id, tokenizer.vocab_size) == (0, (1,), None, 20)


def test_tiny_tokenizer_refuses_a_character_outside_its_alphabet() -> None:
    with pytest.raises(QuintetError, match=r"no token for 'x' .*\n.*model\.tiny\.alphabet"):
        load_tokenizer(small_config()).encode("3x4=")
