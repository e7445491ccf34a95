"""Chat templates: read as checkpoints keep them, rendered as transformers would, and unable to leave the sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.paths import EXAMPLES
from trtllm_replayssm.errors import CheckpointError, RequestError
from trtllm_replayssm.runtime.text.chat_template import ChatTemplate, load_chat_template

MESSAGES = [{"role": "user", "content": "Hi <&> é"}, {"role": "assistant", "content": "Yes"}]
SECRET = "the content of a file"


def test_the_bundled_template_gives_the_text_it_was_trained_on() -> None:
    template = load_chat_template(EXAMPLES / "qwen3_5-tiny-nvfp4")
    assert template is not None
    turns = "<|im_start|>user\nHi <&> é<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
    assert template.render(MESSAGES) == turns + "<|im_start|>assistant\n"
    assert template.render(MESSAGES, add_generation_prompt=False) == turns


def test_rendering_agrees_with_transformers() -> None:
    jinja = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs transformers")
    source = (
        "{{ bos_token }}{% for m in messages %}\n  {%- if loop.index0 > 5 %}{% break %}{% endif %}\n"
        "    {% if m.role == 'user' %}\n[{{ m.content | trim }}]{{ m | tojson }}\n    {% endif %}\n{% endfor %}\n"
        "{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}{% if add_generation_prompt %}>{% endif %}"
    )
    theirs, _ = jinja.render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES) == theirs[0]


def test_a_block_that_marks_the_assistants_text_is_text_as_in_transformers() -> None:
    source = (
        "{% set x = 'out' %}{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{% set x = 'in' %}"
        "{{ m.content }}{{ x }}{% endgeneration %}{{ x }}{% else %}<u>{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    text = ChatTemplate(source).render(messages)
    assert text == "<u>Hi<a>Hoinout"
    file = str(EXAMPLES / "qwen3_5-tiny-nvfp4" / "tokenizer.json")
    tokenizer = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_file=file)
    assert tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False) == text
    with pytest.raises(CheckpointError, match="endgeneration"):
        ChatTemplate("{% generation %}{{ messages }}")


def test_a_file_beside_the_configuration_wins_and_a_list_has_a_default(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    config = {"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "{{ eos_token }}D"}],
              "eos_token": {"content": "<e>"}}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(tmp_path)
    assert template is not None and template.render(MESSAGES) == "<e>D"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}J")
    template = load_chat_template(tmp_path)
    assert template is not None and template.render(MESSAGES) == "<e>J"


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(CheckpointError, match="Jinja"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    "attack",
    [
        "{% include FILE %}",
        "{% import FILE as f %}{{ f }}",
        "{% extends FILE %}",
        "{{ self._TemplateReference__context.environment.loader.get_source(none, FILE) }}",
        "{{ cycler.__init__.__globals__.os.popen('cat ' ~ FILE).read() }}",
        "{{ lipsum.__globals__['os'].popen('cat ' ~ FILE).read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['Path'](FILE).read_text() }}",
        "{{ strftime_now.__globals__['Path'](FILE).read_text() }}",
        "{{ strftime_now.__globals__.__builtins__.open(FILE).read() }}",
        "{{ '{0.__class__.__base__}'.format(messages) }}",
        "{{ ('{0.__clas' ~ 's__}').format(messages) }}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages.append({'role': 'x'}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{{ 'x' * 9999 }}{% endfor %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('no such role') }}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_hostile_template_reads_no_file_and_fails_as_a_request(tmp_path: Path, attack: str) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    messages = [dict(message) for message in MESSAGES]
    try:
        text = ChatTemplate(attack.replace("FILE", repr(str(file)))).render(messages)
    except RequestError as error:
        text = str(error)
        assert error.argument == "messages" and len(text) < 500
    assert SECRET not in text and "<class" not in text and "subclasses" not in text.replace("__subclasses__", "")
    assert messages == MESSAGES


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"\xff"), ("tokenizer_config.json", b"[" * 100_000), ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}'), ("tokenizer_config.json", b'{"chat_template": 1}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": [1]}]}'),
        ("chat_template.jinja", b"\xff"),
    ],
)  # fmt: skip
def test_files_that_are_damaged_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_chat_template(tmp_path)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools"])
def test_more_variables_reach_the_template_but_replace_nothing(name: str) -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ messages | length }}")
    assert template.render(MESSAGES, extra={"enable_thinking": True}) == "True2"
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        template.render(MESSAGES, extra={name: 1})
