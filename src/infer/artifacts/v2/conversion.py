"""A v1-shaped artifact as a record, so that either format can hold it. Pure."""

from __future__ import annotations

from infer.artifacts.generation import ArtifactChoice, GenerationArtifact
from infer.artifacts.record import ChoiceRecord, FieldRows, GenerationRecord, ParentReference, Provenance
from infer.artifacts.v1.encoder import float_array, integer_array
from infer.artifacts.v1.semantics import check_logprobs, check_routes, check_tokens, integer, malformed

_MANY = 2**62


def record_of(
    artifact: GenerationArtifact, *, provenance: Provenance | None = None, parent: ParentReference | None = None
) -> GenerationRecord:
    """The same facts. Raises `ArtifactError` when the values do not fit together."""
    if not artifact.choices:
        raise malformed("an artifact needs at least one choice")
    choices = tuple(_choice(choice) for choice in artifact.choices)
    return GenerationRecord(choices=choices, provenance=provenance or Provenance(), parent=parent)


def _choice(choice: ArtifactChoice) -> ChoiceRecord:
    prompt = integer(choice.prompt_token_count, "prompt_token_count")
    tokens = integer_array(choice.sequence_token_ids, "sequence_token_ids", 1, _MANY)
    check_tokens(tokens, prompt)
    fields: dict[str, FieldRows] = {}
    routes, logprobs = choice.moe_routes, choice.selected_logprobs
    if routes is not None:
        ids = integer_array(routes.expert_ids, "expert_ids", 3, _MANY)
        start = integer(routes.token_start, "moe_routes token_start")
        layers = tuple(integer(value, "router_ids") for value in routes.router_ids)
        counts = tuple(integer(value, "expert_counts", 1) for value in routes.expert_counts)
        check_routes(ids, start, layers, counts, len(tokens))
        fields["moe_routes"] = FieldRows(
            values=ids, row_start=start, attributes={"layer_ids": layers, "expert_counts": counts}
        )
    if logprobs is not None:
        values = float_array(logprobs.logprobs, _MANY)
        start = integer(logprobs.token_start, "selected_logprobs token_start")
        check_logprobs(values, start, prompt, len(tokens))
        fields["selected_logprobs"] = FieldRows(values=values, row_start=start)
    return ChoiceRecord(
        choice_index=integer(choice.choice_index, "choice_index"),
        prompt_token_ids=tokens[:prompt],
        output_token_ids=tokens[prompt:],
        fields=fields,
    )
