from __future__ import annotations

import json
import threading
from datetime import datetime
from pathlib import Path

import pytest
from text_helpers import BYTE_LEVEL_CONFIG, CHATML, LLAMA2_CHAT, byte_level, save
from transformers import AutoTokenizer

from punica_batch.errors import InputError, ModelError, RowError
from punica_batch.text.chat import ChatTemplate, find_chat_template
from punica_batch.text.messages import parse_messages

SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
TALK = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Привет 😀 {{ bos_token }}"},
    {"role": "assistant", "content": 'A "quoted" answer'},
    {"role": "user", "content": "  more \n"},
]
TRICKY = """{%- for message in messages %}
    {%- if loop.index0 % 2 == 1 and message['role'] != 'user' %}
        {%- continue %}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] }}{% endgeneration %}
    {% else %}
{{ message | tojson }} {{ message.content | trim }}
    {% endif %}
    {%- set ns = namespace(last=message) %}
{%- endfor %}
{{ tools is none }} {{ [1, {'a': 'ü'}] | tojson(indent=2) }} {{ messages[-1].content.strip().upper()[:3] }}
{%- if add_generation_prompt %}
<|assistant|>
{%- endif %}

"""


def render(source: str, messages: list | None = None, **kwargs: object) -> str:
    return ChatTemplate(source, SPECIAL, **kwargs).render(TALK if messages is None else messages)


def failure(source: str, messages: list | None = None, **kwargs: object) -> RowError:
    with pytest.raises(RowError) as caught:
        render(source, messages, **kwargs)
    return caught.value


@pytest.mark.parametrize("source", [CHATML, LLAMA2_CHAT, TRICKY])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_text_is_that_of_transformers(tmp_path: Path, source: str, add_generation_prompt: bool) -> None:
    theirs = AutoTokenizer.from_pretrained(save(tmp_path, byte_level(), BYTE_LEVEL_CONFIG, chat_template=source))
    expected = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=add_generation_prompt)
    ours = ChatTemplate(find_chat_template(tmp_path, None), SPECIAL)
    assert ours.render(TALK, add_generation_prompt=add_generation_prompt) == expected


def test_the_date_is_the_jobs() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}", now=datetime(2024, 7, 26, 9)) == "26 Jul 2024"


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ (messages | attr('__class__')).__mro__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ ('{0.__class__.__mro__}' | attr('format'))(messages) }}",
    "{% set f = 'x{0.__class__.__mro__}'.format_map %}{{ f({'0': messages}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.__html__ = 1 %}{{ ns }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages.clear() }}",
    "{{ lipsum.__globals__ }}",
    "{{ strftime_now.__self__.__class__ }}",
    "{{ dict.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_but_the_messages_can_be_reached(source: str) -> None:
    messages = [dict(message) for message in TALK]
    try:
        text = render(source, messages)
    except RowError as error:
        text = error.code
    assert text in ("", "template_failed")  # jinja2 prints some of what is forbidden as undefined: nothing
    assert messages == TALK


HUGE = [
    "{{ 'a' * 1000000000 }}",
    "{{ 1000000000 * 'a' }}",
    "{{ [0] * 1000000000 }}",
    "{{ 2 ** 100000000 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a' | indent(1000000000, first=true) }}",
    "{{ [1] | batch(1000000000, 0) | list }}",
    "{{ 1.5 | round(1000000000) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ {} | tojson(indent=1000000000) }}",
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
    "{% set ns = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s | replace('x', 'xx') %}{% endfor %}",
    "{% set s = 'x' * 4000000 %}{{ s.join(s) }}",
    "{% set ns = namespace(l=[0]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
]


@pytest.mark.parametrize("source", HUGE)
def test_much_from_little_is_refused(source: str) -> None:
    assert failure(source).code == "template_failed"


def test_ordinary_use_of_what_is_guarded_still_works() -> None:
    source = (
        "{{ 'ab' * 3 }} {{ 2 ** 10 }} {{ 7 % 3 }} {{ '%05d|%s' % (42, 'x') }} {{ '{:>4}|{}'.format(1, 20240101) }} "
        "{{ 'a' | center(5) }}| {{ [1, 2] | join(', ') }} {{ 'x'.join(['1', '2']) }} {{ 'aXb' | replace('X', '-') }} "
        "{{ 1 ~ 'a' ~ none }} {{ [1] + [2] }} {{ 3.14159 | round(2) }} {{ 'Date 20240101 %s' % 'x' }} "
        "{{ ('a' ~ 2).ljust(4) }}| {{ 'l1\nl2' | indent(2) }} {{ range(4) | batch(2) | list }} "
        "{{ messages | map(attribute='role') | join('/') }}"
    )
    assert render(source) == (
        "ababab 1024 1 00042|x    1|20240101   a  | 1, 2 1x2 a-b 1aNone [1, 2] 3.14 Date 20240101 x a2  | "
        "l1\n  l2 [[0, 1], [2, 3]] system/user/assistant/user"
    )


def test_a_template_that_never_ends_is_stopped() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% if 0 %}x{% endif %}{% endfor %}{% endfor %}"
    template = ChatTemplate(source, SPECIAL, max_seconds=0.2)
    for _ in range(2):
        with pytest.raises(RowError) as caught:
            template.render(TALK)
        assert caught.value.code == "template_timeout"
    assert render("ok", max_seconds=0.2) == "ok"


def test_templates_render_in_other_threads_too() -> None:
    out: list[str] = []
    thread = threading.Thread(target=lambda: out.append(render("{{ messages[0].role }}")))
    thread.start()
    thread.join()
    assert out == ["system"]


def test_an_error_never_shows_the_messages() -> None:
    secret = [{"role": "user", "content": "SECRET"}]
    said = failure("{{ raise_exception('Roles must alternate!') }}", secret)
    assert (said.code, "Roles must alternate!" in said.sentence) == ("template_failed", True)
    for source in (
        "{{ raise_exception('no ' + messages[0].content) }}",
        "{{ messages[0][messages[0].content].x }}",
        "{{ nothing.at_all }}",
        "line one\n{{ messages[0].content | int(base=messages[0].content) + messages }}",
    ):
        error = failure(source, secret)
        assert error.code == "template_failed"
        assert "SECRET" not in str(error)
        assert "\n" not in str(error)
    assert "line 2" in str(error)


def test_a_template_with_a_syntax_error_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"^here: line 2: "):
        ChatTemplate("ok\n{% for %}", SPECIAL, where="here")
    with pytest.raises(InputError, match="larger"):
        ChatTemplate("x" * (1 << 21), SPECIAL)


def test_where_the_template_is_found(tmp_path: Path) -> None:
    bare = save(tmp_path / "bare", byte_level())
    assert find_chat_template(bare, None) is None
    one = save(tmp_path / "one", byte_level(), {"chat_template": "from config"})
    assert find_chat_template(one, None) == "from config"
    both = save(tmp_path / "both", byte_level(), {"chat_template": "from config"}, chat_template="from file")
    assert find_chat_template(both, None) == "from file"
    assert find_chat_template(both, "{{ given }}") == "{{ given }}"
    file = tmp_path / "mine.jinja"
    file.write_text("from mine")
    assert find_chat_template(both, str(file)) == "from mine"
    with pytest.raises(InputError, match="--chat-template"):
        find_chat_template(both, str(tmp_path / "absent.jinja"))


def test_one_of_several_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "rag", "template": "with documents"}]
    folder = save(tmp_path / "a", byte_level(), {"chat_template": named})
    assert find_chat_template(folder, None) == "plain"
    assert find_chat_template(folder, "rag") == "with documents"
    folder = save(tmp_path / "b", byte_level(), {"chat_template": named[1:]})
    with pytest.raises(ModelError, match="rag"):
        find_chat_template(folder, None)


def test_messages_are_cleaned_as_transformers_does() -> None:
    raw = [{"role": "user", "content": "hi", "name": None, "tool_calls": None}]
    assert parse_messages(raw) == [{"role": "user", "content": "hi"}]
    assert parse_messages(json.dumps(raw)) == [{"role": "user", "content": "hi"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert parse_messages(parts) == [{"role": "user", "content": "a\nb"}]
    call = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]
    assert parse_messages(call) == [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]


def test_the_system_prompt_goes_first_unless_there_is_one() -> None:
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "mine"}
    assert parse_messages([user], "theirs") == [{"role": "system", "content": "theirs"}, user]
    assert parse_messages([system, user], "theirs") == [system, user]


@pytest.mark.parametrize(
    "messages",
    [
        [], {}, "nothing", "[", "3", 3, [3], [None], [{}], [{"role": "user"}], [{"content": "x"}],
        [{"role": "", "content": "x"}], [{"role": 3, "content": "x"}], [{"role": "user", "content": 3}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": ["x"]}],
    ],
)  # fmt: skip
def test_bad_messages(messages: object) -> None:
    with pytest.raises(RowError) as caught:
        parse_messages(messages)
    assert caught.value.code == "bad_messages"


def test_messages_too_long_to_render() -> None:
    with pytest.raises(RowError) as caught:
        parse_messages([{"role": "user", "content": "x" * (5 << 20)}])
    assert caught.value.code == "prompt_too_long"
