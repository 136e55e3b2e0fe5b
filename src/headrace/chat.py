"""Messages to a prompt, through the Jinja template that a GGUF file carries (`tokenizer.chat_template`).

The environment is the one that model makers write for (transformers' `apply_chat_template`): immutable sandbox,
trimmed blocks, loop controls, `raise_exception`, `strftime_now`, `tojson` that keeps non-ASCII text, and a
`generation` tag that only training uses. A template is part of a downloaded file, so it never leaves the sandbox.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

log = logging.getLogger(__name__)

KEY = "tokenizer.chat_template"
CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""Where a file has no template but ChatML's tokens; it knows no tools."""

Message = Mapping[str, Any]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, > and & for HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@cache
def _environment() -> "ImmutableSandboxedEnvironment":
    # here: 40 ms that only a conversation needs
    from jinja2 import TemplateError, ext, nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """`{% generation %}` marks what a training loss sees; here its body is plain text."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _tojson
    env.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return env


class ChatTemplate:
    """One file's template. `bos`, `eos`: the texts of its tokens, "" where it has none.

    `tool_template` is used instead when tools are given. `drop_bos`: the tokenizer will put a BOS in front, so the
    template's own is taken off (llama.cpp does the same); a prompt then starts with exactly one.
    """

    def __init__(
        self, template: str, bos: str, eos: str, source: str, *, tool_template: str | None = None,
        drop_bos: bool = False,
    ) -> None:  # fmt: skip
        self.source, self.text, self._bos, self._eos, self._drop_bos = source, template, bos, eos, drop_bos
        self._template = self._compiled(template)
        self._tool_template = self._compiled(tool_template) if tool_template else self._template

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> "ChatTemplate":
        """The file's template; ChatML where it has none but knows ChatML's tokens, else UserError."""
        template, tool_template = metadata.get(KEY), metadata.get(KEY + ".tool_use")
        if template is None:
            if tokenizer.token_id("<|im_start|>") is None or tokenizer.token_id("<|im_end|>") is None:
                raise UserError(f"{source}: the file has no chat template ({KEY}); give a plain prompt instead")
            log.warning("%s: no chat template in the file, so ChatML (<|im_start|>role) is used", source)
            template = CHATML
        if not isinstance(template, str) or not isinstance(tool_template, str | None):
            raise UserError(f"{source}: {KEY} is not a string")
        bos, eos = ("" if i is None else tokenizer.token_text(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
        return cls(template, bos, eos, source, tool_template=tool_template, drop_bos=tokenizer.add_bos)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any,
    ) -> str:  # fmt: skip
        """The prompt for messages of `role`, `content` and perhaps `tool_calls` (OpenAI's form).

        Text parts are joined; tool-call arguments become what the template expects, an object or its JSON text.
        `kwargs` are the template's own switches, such as `enable_thinking=False`. UserError: the template refuses the
        messages or is broken.
        """
        plain = [self._plain(message) for message in messages]
        if any(message.get("tool_calls") for message in plain):
            plain = [_with_arguments(message, self._takes_objects) for message in plain]
        text = self._rendered(plain, add_generation_prompt, list(tools) if tools else None, kwargs)
        return text.removeprefix(self._bos) if self._drop_bos and self._bos else text

    def _compiled(self, template: str) -> "Template":
        from jinja2 import TemplateSyntaxError

        try:
            return _environment().from_string(template)
        except TemplateSyntaxError as e:
            raise UserError(f"{self.source}: chat template, line {e.lineno}: {e.message}") from None
        except (RecursionError, ValueError, OverflowError) as e:
            raise UserError(f"{self.source}: chat template: {type(e).__name__}: {e}") from None

    def _rendered(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: Any, switches: Mapping[str, Any]
    ) -> str:
        from jinja2 import TemplateError

        values = {
            "messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt,
            "bos_token": self._bos, "eos_token": self._eos,
        }  # fmt: skip
        try:
            return (self._tool_template if tools else self._template).render(values | dict(switches))
        except TemplateError as e:
            what = "refuses these messages" if type(e) is TemplateError else f"fails{_line(e)}"
            raise UserError(f"{self.source}: the chat template {what}: {_one_line(e)}") from None
        except Exception as e:  # the file's code: whatever it does wrong
            raise UserError(
                f"{self.source}: the chat template fails{_line(e)}: {type(e).__name__}: {_one_line(e)}"
            ) from None

    def _plain(self, message: Message) -> dict[str, Any]:
        """A copy with the text parts of the content joined."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"a chat message needs a role: {message!r:.80}")
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
                raise UserError(f"{self.source}: only text in chat messages, no other parts: {content!r:.80}")
            content = "".join(part["text"] for part in content)
        return {**message, "content": content}

    @cached_property
    def _takes_objects(self) -> bool:
        """Whether arguments of a tool call are an object (most templates) or JSON text, found by rendering a call."""
        for as_object in (True, False):
            try:
                text = self._rendered(
                    [_with_arguments(m, as_object) for m in _call("needle", {"a": "é"})], False, None, {}
                )
            except UserError:
                continue
            # an object pasted into text shows as Python writes it
            if "é" in text and "{'" not in text:
                return as_object
        return True


def _line(error: BaseException) -> str:
    """Where in the template: Jinja maps its frames to template lines."""
    line, tb = 0, error.__traceback__
    while tb:
        if tb.tb_frame.f_code.co_filename == "<template>":
            line = tb.tb_lineno
        tb = tb.tb_next
    return f" in line {line}" if line else ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _with_arguments(message: dict[str, Any], as_object: bool) -> dict[str, Any]:
    """A message whose tool calls have their arguments as an object, or as JSON text."""
    if not message.get("tool_calls"):
        return message

    def convert(arguments: Any) -> Any:
        if as_object and isinstance(arguments, str):
            try:
                found = json.loads(arguments)
            except ValueError:
                return arguments
            return found if isinstance(found, dict) else arguments
        return _tojson(arguments) if not as_object and not isinstance(arguments, str) else arguments

    calls = []
    for call in message["tool_calls"]:
        inner = call.get("function", call)
        inner = {**inner, "arguments": convert(inner.get("arguments", {}))}
        calls.append({**call, "function": inner} if "function" in call else inner)
    return {**message, "tool_calls": calls}


def _call(name: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A question and the tool call that answers it."""
    call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "What is the weather in Zürich?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def check_template(template: ChatTemplate) -> list[str]:
    """Problems of a template, one line each: what a conversation with a system message and a tool call would lose.

    Also whether a conversation's prompt continues with the next turn: only then is the cache reused.
    """
    question, call = _call("get_weather", {"city": "Zürich <b>", "days": 3})
    result = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"sky": "söft-rain"}'}
    answer, thanks = {"role": "assistant", "content": "Söft rain."}, {"role": "user", "content": "Thänks!"}
    system = {"role": "system", "content": "Be brïef."}
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Forecast for a plâce.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    problems: list[str] = []

    def rendered(what: str, messages: list[dict[str, Any]], wanted: Sequence[str], **options: Any) -> str | None:
        try:
            text = template.render(messages, **options)
        except UserError as e:
            problems.append(f"{what}: {e}")
            return None
        problems.extend(f"{what}: {piece!r} is lost" for piece in wanted if piece not in text)
        return text

    first = rendered("a question", [question], [question["content"]])
    closed = rendered("a question without generation prompt", [question], [], add_generation_prompt=False)
    if first is not None and first == closed:
        problems.append("a question: add_generation_prompt changes nothing, so the model may not know that it is asked")
    if first is not None and closed is not None and not first.startswith(closed):
        problems.append("a question: the generation prompt is not at the end")
    rendered("a system message", [system, question], [system["content"], question["content"]])
    turns = [question, answer, thanks]
    second = rendered("two turns", turns, [m["content"] for m in turns])
    if closed is not None and second is not None and not second.startswith(closed):
        problems.append("two turns: the prompt does not continue the first one, so its cache is not reused")
    trip = [system, question, call, result]
    names = ["get_weather", "Forecast for a plâce.", "Zürich <b>", "söft-rain", system["content"]]
    text = rendered("a tool call", trip, names, tools=[tool])
    if text is not None and "{'" in text:
        problems.append("a tool call: an object is written as Python does, not as JSON")
    if text is not None and text.count("get_weather") < 2:
        problems.append("a tool call: the call or the tool's description is lost")
    return problems
