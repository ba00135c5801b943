"""The OpenAI chat format over an engine: POST /v1/chat/completions, GET /v1/models, GET /health, and as vLLM has it
POST /tokenize, which counts a prompt's tokens.

Done: messages, tools (in the prompt; calls come back as text with their tags), temperature, max_tokens, stop, n, seed,
chat_template_kwargs. What is not done is refused with status 400 and the field's name, never ignored: stream, logprobs,
response_format, top_p and whatever else would change the answer.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from awpo.serving.engine import ChatRequest, Engine

USUAL_TOKENS = 1024
"""Longest answer where a request names none."""
MOST_CHOICES, MOST_STOPS = 128, 16
LARGEST_BODY = 32 * 2**20

_TEMPLATE_OPTIONS = {
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
}
"""What a tokenizer's `apply_chat_template` takes besides what it hands on to the template."""
_DONE = {
    "model", "messages", "tools", "temperature", "max_tokens", "max_completion_tokens", "stop", "n", "seed",
    "chat_template_kwargs",
}  # fmt: skip
_HARMLESS = {"user", "metadata", "store", "safety_identifier", "service_tier", "stream_options", "parallel_tool_calls"}
"""Fields that change no answer: ignored."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "top_p": (1, 1.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "tool_choice": ("auto",),
}
"""Fields that are not done, with the values that ask for nothing."""


class Refused(Exception):
    """A request that cannot be answered; the message is for whoever sent it."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def read_request(body: Any, tokenizer: Any, context: int, name: str) -> ChatRequest:
    """The request in a JSON body. Raises Refused, with the field's name, for what is wrong or is not done."""
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    if body.get("model") != name:
        raise Refused(f"the model {body.get('model')!r} is not served here; this is {name!r}", 404)
    for field, value in body.items():
        if field in _DONE or field in _HARMLESS or value is None:
            continue
        if field not in _NEUTRAL:
            raise Refused(f"unknown field {field!r}: this server would have to ignore it")
        if value not in _NEUTRAL[field]:
            raise Refused(f"{field!r} is not done by this server; leave it out")
    temperature = _number(body, "temperature", 1.0, 0, 2)
    ids = _prompt_ids(body, tokenizer)
    room = context - len(ids)
    if room < 1:
        raise Refused(f"'messages' take {len(ids)} tokens, and the model has a context of {context}")
    given = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    limit = int(_number(body, given, min(USUAL_TOKENS, room), 1, 1 << 30, whole=True))
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, (list, tuple)) or len(stop) > MOST_STOPS or not all(isinstance(s, str) and s for s in stop):
        raise Refused(f"'stop' must be a text or a list of at most {MOST_STOPS}")
    seed = None if body.get("seed") is None else int(_number(body, "seed", 0, -(2**63), 2**63, whole=True))
    n = int(_number(body, "n", 1, 1, MOST_CHOICES, whole=True))
    return ChatRequest(tuple(ids), min(limit, room), n, float(temperature), tuple(stop), seed)


def _number(
    body: dict[str, Any], field: str, default: float, least: float, most: float, *, whole: bool = False
) -> float:
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not least <= value <= most:
        raise Refused(f"{field!r} must be {'a whole number' if whole else 'a number'} from {least} to {most}")
    return value


def _prompt_ids(body: dict[str, Any], tokenizer: Any) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise Refused("'messages' must be a list of objects, one at least")
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise Refused("'chat_template_kwargs' must be an object")
    # What a template is told, and nothing that says how: a client's own template would be a program of the client's.
    if ours := sorted(_TEMPLATE_OPTIONS & options.keys()):
        raise Refused(f"'chat_template_kwargs' may not set {', '.join(ours)}")
    try:
        text = tokenizer.apply_chat_template(
            [_for_template(message) for message in messages],
            tools=body.get("tools") or None,
            add_generation_prompt=True,
            tokenize=False,
            **options,
        )
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001 -- templates raise what they like at messages that they do not know
        raise Refused(f"'messages' do not fit the model's chat template: {str(error)[:200]}") from None
    if not ids:
        raise Refused("'messages' make an empty prompt")
    return ids


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Content parts as one text, arguments of calls as objects: what templates expect."""
    made = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused("'content' may hold parts of text only")
        made["content"] = "".join(part["text"] for part in content)
    elif content is None:
        made["content"] = ""
    elif not isinstance(content, str):
        raise Refused("'content' must be a text")
    if message.get("tool_calls"):
        try:
            made["tool_calls"] = [_call_for_template(call) for call in message["tool_calls"]]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Refused(f"'tool_calls' cannot be read: {error}") from None
    return made


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def make_application(engine: Engine, name: str) -> Starlette:
    """The application that serves the engine's model under a name."""

    def refusal(error: Refused) -> JSONResponse:
        kind = "invalid_request_error"
        return JSONResponse({"error": {"message": str(error), "type": kind}}, status_code=error.status)

    async def body_of(request: Request) -> Any:
        body = bytearray()
        async for part in request.stream():  # a body in chunks tells no length
            body += part
            if max(len(body), int(request.headers.get("content-length") or 0)) > LARGEST_BODY:
                raise Refused(f"the body is longer than {LARGEST_BODY} bytes", 413)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise Refused("the body is not JSON") from None

    async def tokenize(request: Request) -> JSONResponse:
        try:
            body = await body_of(request)
            if not isinstance(body, dict):
                raise Refused("the body must be a JSON object")
            ids = await run_in_threadpool(_prompt_ids, body, engine.tokenizer)
        except Refused as error:
            return refusal(error)
        return JSONResponse({"count": len(ids), "max_model_len": engine.context})

    async def chat(request: Request) -> JSONResponse:
        try:
            body = await body_of(request)
            asked = await run_in_threadpool(read_request, body, engine.tokenizer, engine.context, name)
        except Refused as error:
            return refusal(error)
        choices = await asyncio.wrap_future(engine.submit(asked))
        completion = sum(choice.tokens for choice in choices)
        return JSONResponse(
            {
                "id": f"chatcmpl-{uuid.uuid4().hex}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": name,
                "choices": [
                    {
                        "index": index,
                        "message": {"role": "assistant", "content": choice.text},
                        "finish_reason": choice.finish,
                        "logprobs": None,
                    }
                    for index, choice in enumerate(choices)
                ],
                "usage": {
                    "prompt_tokens": len(asked.ids),
                    "completion_tokens": completion,
                    "total_tokens": len(asked.ids) + completion,
                },
            }
        )

    async def models(_: Request) -> JSONResponse:
        model = {"id": name, "object": "model", "created": 0, "owned_by": "awpo", "max_model_len": engine.context}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )
