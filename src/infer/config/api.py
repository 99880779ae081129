"""The section `api`: the HTTP server. Plain data; `config.engine` puts it beside the others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr

from infer.config.section import Section, by_plugin, listed
from infer.config.units import parse_bytes


class ApiSection(Section):
    """The HTTP server; an engine without a server ignores it."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 or :: is every interface."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    uds: str | None = None
    """Path of a unix socket to listen on instead of host and port."""
    fd: Annotated[int, Field(ge=0)] | None = None
    """Descriptor of a bound socket to listen on instead of host and port, as a service manager hands it over."""
    tls_cert: str | None = None
    """Certificate chain in PEM; with tls_key the server speaks HTTPS."""
    tls_key: str | None = None
    """Private key in PEM."""
    served_model_names: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    """Names that requests may use for the model, the first in replies; empty: the model reference."""
    api_keys: Annotated[tuple[SecretStr, ...], BeforeValidator(listed)] = ()
    """Keys that requests must show one of, as "Authorization: Bearer KEY". Never logged; other users of the machine
    can read a command line, so prefer api_key_file or the environment."""
    api_key_file: str | None = None
    """File with one key per line, in addition to api_keys."""
    cors_origins: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    """Origins whose web pages may call the server, besides its own; "*" is every origin."""
    unknown_fields: Literal["refuse", "notice"] = "refuse"
    """What happens to a request with a field nobody knows: 400 naming it, or a notice in the response headers."""
    max_body_bytes: Annotated[int, Field(ge=1024), BeforeValidator(parse_bytes)] = 32 * 2**20
    """Longest request body in bytes, or in words ("32MiB"); longer ones are refused with 413."""
    max_header_bytes: Annotated[int, Field(ge=1024), BeforeValidator(parse_bytes)] = 32 * 2**10
    """Longest request head in bytes; longer ones are refused with 431."""
    max_concurrent_requests: Annotated[int, Field(ge=1)] = 2048
    """HTTP requests in progress; further ones are refused with 429. scheduler.max_num_waiting bounds the engine's queue."""
    max_logprobs: Annotated[int, Field(ge=0)] = 20
    """Most alternatives per token that a request may ask for."""
    max_logprob_token_ids: Annotated[int, Field(ge=0)] = 128
    """Most token ids that a request may have scored at every position."""
    max_kept_ids: Annotated[int, Field(ge=0)] = 1024
    """Most ids per token that return_kept_set may return: such a request must have a top_k of at most this."""
    responses_max_count: Annotated[int, Field(ge=0)] = 10_000
    """Responses of /v1/responses that are kept in memory; the least recently used makes room. 0: none are kept."""
    responses_max_bytes: Annotated[int, Field(ge=0), BeforeValidator(parse_bytes)] = 256 * 2**20
    """Bytes that they may take together."""
    request_deadline: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which a request ends with what it has. None: no limit."""
    body_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds a client may take to send a request body."""
    write_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds a client may leave a stream unread before it is dropped."""
    idle_timeout: Annotated[float, Field(gt=0)] = 75.0
    """Seconds an idle connection is kept."""
    sse_keep_alive: Annotated[float, Field(gt=0)] = 10.0
    """Seconds of silence in a stream after which a comment is sent."""
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that running requests have to finish after a stop was asked for."""
    health_deadline: Annotated[float, Field(gt=0)] = 30.0
    """Seconds without a completed step, while there is work, after which /health turns red."""
    health_probe_deadline: Annotated[float, Field(gt=0)] | None = None
    """Seconds that a health check waits for a step of its own on an idle engine. None: a third of health_deadline; a
    machine that is short of CPU time needs more than a healthy step takes."""
    force_include_usage: bool = False
    """Send token usage at the end of every stream, asked for or not."""
    admin: bool = False
    """Serve the routes that act on the whole server (resetting caches, aborting requests)."""
    admin_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of a listener for admin routes alone: with it the public listener has none. 0 takes a free one."""
    admin_host: str | None = None
    """Address of that listener; None is 127.0.0.1."""
    admin_uds: str | None = None
    """Path of a unix socket to serve admin routes on, instead of admin_port."""
    tool_parser: str = "auto"
    """Output parser that finds tool calls in answers; auto: by the chat template; none: calls stay in the text."""
    reasoning_parser: str = "auto"
    """Output parser that tells reasoning from the answer; auto: structured_output.reasoning_parser; none: it stays in the
    text."""
    endpoints: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    """Endpoint plugins whose routes are served, by name; an installed one that is not named adds nothing."""
    endpoint_options: Annotated[dict[str, dict[str, Any]], BeforeValidator(by_plugin), Field(repr=False)] = Field(
        default_factory=dict
    )
    """Options of these, by plugin name, as JSON: {"count-words": {"max_tokens": 64}}. Never logged: they may hold a password."""
    tokenizer_info: bool = False
    """Serve /tokenizer_info, which shows the chat template."""
