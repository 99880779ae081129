"""`/v1/completions/render`: what a completion call becomes for the engine, one body of `/inference/v1/generate` a prompt.

Runs in request tasks. The functions are those of `/v1/completions`, so that both mean the same.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from infer.api.artifacts import carried
from infer.api.context import ApiContext
from infer.api.openai import completions, generation
from infer.api.openai.models import check_model
from infer.api.openai.schemas import COMPLETION
from infer.api.render import Renderer
from infer.api.routing import ApiRoute, Call
from infer.errors import InvalidRequestError


def routes(context: ApiContext) -> list[ApiRoute]:
    renderer = Renderer(context)

    async def render(call: Call) -> Response:
        return call.json(await render_completions(renderer, call))

    return [
        ApiRoute(
            method="POST",
            path="/v1/completions/render",
            handler=render,
            body=COMPLETION,
            summary="Completions as /inference/v1/generate",
        )
    ]


async def render_completions(renderer: Renderer, call: Call) -> list[dict[str, Any]]:
    """A list in the order of the prompts, also for one."""
    settings = call.context.settings
    body, values = COMPLETION.parse(call.data, unknown=settings.unknown_fields, notices=call.notices)
    model = check_model(call.context, body.model)
    params, num_returned = completions.completion_params(body, values, call)
    if params.n != num_returned:
        raise InvalidRequestError(
            f"best_of={params.n} with n={num_returned} cannot be rendered: the choice is made by /v1/completions",
            parameter="best_of",
            value=params.n,
        )
    prompts = await completions.encode_prompts(body, call)
    generation.check_choices(params.n, len(prompts))
    asks = generation.make_asks(call, "cmpl", [prompt.ids for prompt in prompts], params, body)
    artifact = carried(call.data, len(prompts), max_tokens=body.max_tokens == 0)
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    rendered = []
    for index, ask in enumerate(asks):
        one: dict[str, Any] = {"request_id": ask.request_id, "model": model}
        if isinstance(given[index], str):
            one["prompt_text"] = given[index]
        one |= {
            "token_ids": ask.prompt,
            "sampling_params": renderer.sampling_in_force(params),
            "priority": ask.priority,
        }
        optional = {"cache_salt": ask.cache_salt, "deadline": ask.deadline, **artifact}
        rendered.append(one | {name: value for name, value in optional.items() if value is not None})
    return rendered
