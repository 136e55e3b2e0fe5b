"""Chat templates: the shapes of the families people run, what a hostile or broken one does, and the checks."""

import logging
from datetime import datetime

import pytest

from headrace.chat import ChatTemplate, check_template
from headrace.errors import UserError
from headrace.tokenizer import BYTE_OF, load_tokenizer
from texts import CONTROL, NORMAL, metadata_of

CHATML_TOOLS = """\
{%- macro calls_of(message) %}
    {%- for call in message.tool_calls %}
        {%- set call = call.function if call.function else call %}
        {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
        {{- call.arguments if call.arguments is string else call.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nSignatures within <tools></tools>:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be first.') }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- content ~ calls_of(message) ~ '<|im_end|>\\n' }}{%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- set ns = namespace(system='', start=0) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- ns.system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("One tool call at a time!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
HARMONY = """\
{%- macro kind(schema) -%}
    {%- if schema.type == "array" -%}{{- kind(schema['items']) }}[]{%- else -%}{{- schema.type }}{%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") + "\\n\\nReasoning: " }}
{{- reasoning_effort | default("medium") }}{{- "<|end|>" }}
{%- set first = messages[0] if messages[0].role in ["developer", "system"] else none %}
{%- if first or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if first %}{{- "# Instructions\\n\\n" + first.content + "\\n\\n" }}{%- endif %}
    {%- if tools %}
        {{- "# Tools\\n\\nnamespace functions {\\n\\n" }}
        {%- for tool in tools %}
            {%- set tool = tool.function %}
            {{- "// " + tool.description + "\\ntype " + tool.name + " = (_: {" }}
            {%- for name, schema in tool.parameters.properties.items() %}
                {%- set mark = "" if name in (tool.parameters.required or []) else "?" %}
                {{- "\\n" + name + mark + ": " + kind(schema) + "," }}
            {%- endfor %}
            {{- "\\n}) => any;\\n\\n" }}
        {%- endfor %}
        {{- "} // namespace functions" }}
    {%- endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in (messages[1:] if first else messages) %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
        {{- call.arguments | tojson }}{{- "<|call|>" }}
        {%- set last.name = call.name %}
    {%- elif message.role == 'assistant' %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}{%- break %}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content + "<|end|>" }}
    {%- else %}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""
TEXT_ARGUMENTS = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}
{{- '<|User|>' + m.content }}{% elif m.role == 'tool' %}{{ '<|tool|>' + m.content }}{% elif m.tool_calls %}
{%- for call in m.tool_calls %}{{ '<|call|>' + call.function.name }}
{{- '\\n```json\\n' + call.function.arguments + '\\n```' }}
{%- endfor %}{% else %}{{ '<|Assistant|>' + m.content + eos_token }}{% endif %}{% endfor %}
{%- for tool in tools or [] %}{{ '<|tools|>' + (tool | tojson) }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""
HI = [{"role": "user", "content": "Hi <b>"}]
CALL = {"function": {"name": "sum", "arguments": {"a": 1, "text": "é <"}}, "type": "function", "id": "1"}
CALLED = [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "sum",
        "description": "Adds & more",
        "parameters": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"}}}},
    },
}


def template(text: str, **options: object) -> ChatTemplate:
    return ChatTemplate(text, "<s>", "</s>", "model.gguf", **options)  # type: ignore[arg-type]


def test_chatml_with_tools() -> None:
    chat = template(CHATML_TOOLS)
    assert chat.render(HI) == "<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    assert chat.render(HI, add_generation_prompt=False) == "<|im_start|>user\nHi <b><|im_end|>\n"
    assert chat.render(HI, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    system = {"role": "system", "content": "Be brief."}
    text = chat.render([system, *CALLED], tools=[TOOL])
    assert text == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\nSignatures within <tools></tools>:\n<tools>\n"
        '{"type": "function", "function": {"name": "sum", "description": "Adds & more", "parameters": {"type": '
        '"object", "properties": {"a": {"type": "array", "items": {"type": "number"}}}}}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n\n<tool_call>\n"
        '{"name": "sum", "arguments": {"a": 1, "text": "é <"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(UserError, match=r"model\.gguf: the chat template refuses .* System message must be first"):
        chat.render([*HI, system])


def test_headers() -> None:
    chat = template(HEADERS)
    text = chat.render([{"role": "system", "content": " Be brief. "}, *HI], date_string="1 Dec 2026")
    assert text == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 1 Dec 2026\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi <b><|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert datetime.now().strftime("%b %Y") in chat.render(HI)
    assert '{"name": "sum", "parameters": {"a": 1, "text": "é <"}}<|eot_id|>' in chat.render(CALLED)
    assert '{\n    "type": "function",\n' in chat.render(HI, tools=[TOOL])
    two = {**CALLED[1], "tool_calls": [CALL, CALL]}
    with pytest.raises(UserError, match="One tool call at a time"):
        chat.render([*HI, two])


def test_harmony() -> None:
    text = template(HARMONY).render(CALLED, tools=[TOOL], reasoning_effort="high")
    assert "Reasoning: high<|end|><|start|>developer<|message|># Tools" in text
    assert "// Adds & more\ntype sum = (_: {\na?: number[],\n}) => any;" in text
    assert 'to=functions.sum<|channel|>commentary json<|message|>{"a": 1, "text": "é <"}<|call|>' in text
    assert text.endswith(
        "<|start|>functions.sum to=assistant<|channel|>commentary<|message|>2<|end|><|start|>assistant"
    )


@pytest.mark.parametrize("text", [CHATML_TOOLS, HEADERS, HARMONY, TEXT_ARGUMENTS])
def test_arguments_take_the_form_that_the_template_expects(text: str) -> None:
    as_text = {**CALL, "function": {"name": "sum", "arguments": '{"a": 1, "text": "é <"}'}}
    given = [*HI, {**CALLED[1], "tool_calls": [as_text]}, CALLED[2]]
    chat = template(text)
    assert chat.render(given) == chat.render(CALLED)
    assert '{"a": 1, "text": "é <"}' in chat.render(given)
    assert given[1]["tool_calls"] == [as_text]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " <b>"}]
    chat = template(CHATML_TOOLS)
    assert chat.render([{"role": "user", "content": parts}]) == chat.render(HI)
    with pytest.raises(UserError, match="only text"):
        chat.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    for wrong in ({}, {"role": 3, "content": "x"}, "hello"):
        with pytest.raises(UserError, match="needs a role"):
            chat.render([wrong])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("{% for %}", "line 1: "),
        ("\n\n{{ x", "line 3: "),
        ("{% endif %}", "line 1: "),
        ("a\n{{ messages[0].nothing.more }}", "fails in line 2: 'dict object' has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "fails in line 1: ZeroDivisionError"),
        ("\n{{ messages + 1 }}", "fails in line 2: TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% for i in range(999999999) %}x{% endfor %}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('no\nway') }}", "refuses these messages: no way"),
        ("{{ x | nofilter }}", "line 1: No filter named 'nofilter'"),
    ],
)
def test_broken_templates_are_one_line(broken: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as e:
        template(broken).render(HI)
    assert str(e.value).startswith("model.gguf: ")
    assert "\n" not in str(e.value)


def small_tokenizer(*special: str, **more: object) -> tuple[dict[str, object], object]:
    tokens = [*sorted(BYTE_OF), *special]
    metadata = metadata_of(tokens, [NORMAL] * 256 + [CONTROL] * len(special), [], pre="qwen2", **more)
    return metadata, load_tokenizer(metadata, "model.gguf")


def test_from_metadata(caplog: pytest.LogCaptureFixture) -> None:
    metadata, tokenizer = small_tokenizer("<|im_start|>", "<|im_end|>", "<s>", bos_token_id=258, eos_token_id=257)
    with caplog.at_level(logging.WARNING):
        chat = ChatTemplate.from_metadata(metadata, tokenizer, "model.gguf")
    assert "no chat template" in caplog.text
    system = {"role": "system", "content": "S"}
    wanted = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    assert chat.render([system, *HI]) == wanted

    metadata["tokenizer.chat_template"] = HEADERS
    metadata["tokenizer.chat_template.tool_use"] = "tools: {{ tools | length }}{{ eos_token }}"
    chat = ChatTemplate.from_metadata(metadata, tokenizer, "model.gguf")
    assert chat.render(HI).startswith("<s><|start_header_id|>")
    assert chat.render(HI, tools=[TOOL]) == "tools: 1<|im_end|>"

    metadata["tokenizer.chat_template"] = 3
    with pytest.raises(UserError, match="not a string"):
        ChatTemplate.from_metadata(metadata, tokenizer, "model.gguf")
    metadata, tokenizer = small_tokenizer("<s>")
    with pytest.raises(UserError, match=r"model\.gguf: the file has no chat template"):
        ChatTemplate.from_metadata(metadata, tokenizer, "model.gguf")


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_prompt_has_one_bos(add_bos: bool) -> None:
    metadata, tokenizer = small_tokenizer("<s>", bos_token_id=256, add_bos_token=add_bos)
    metadata["tokenizer.chat_template"] = HEADERS
    text = ChatTemplate.from_metadata(metadata, tokenizer, "model.gguf").render(HI)
    ids = tokenizer.encode(text, parse_special=True)
    assert ids.count(256) == 1
    assert ids[0] == 256


@pytest.mark.parametrize("text", [CHATML_TOOLS, HEADERS, HARMONY])
def test_good_templates_pass_the_check(text: str) -> None:
    assert check_template(template(text)) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("(tool | tojson)", "tool", "not as JSON"),
        ("+ messages[0].content + '<|im_end|>", "+ '<|im_end|>", "a system message: 'Be brïef.' is lost"),
        ("{%- if add_generation_prompt %}", "{%- if true %}", "add_generation_prompt changes nothing"),
        ("'\\n<tool_response>\\n' + message.content", "'\\n<tool_response>\\n'", "söft-rain"),
        ("{%- if tools %}", "{{- 'Long.' if messages | length > 1 }}{%- if tools %}", "its cache is not reused"),
        ("== 'tool' %}", "== 'tool' %}{{- raise_exception('none please') }}", "refuses these messages: none please"),
        ("call.name", "call.nome.x", "a tool call: model.gguf: the chat template fails in line 4: "),
    ],
)
def test_bad_templates_fail_the_check(old: str, new: str, problem: str) -> None:
    assert old in CHATML_TOOLS
    found = check_template(template(CHATML_TOOLS.replace(old, new)))
    assert any(problem in line for line in found), found
