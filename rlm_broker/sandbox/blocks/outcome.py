"""The outcome of one block, as its caller gets it."""

from rlm_broker.results import Block, PostMortem, Sent, Variable, with_values
from rlm_broker.sandbox.blocks import post_mortem
from rlm_broker.sandbox.blocks.output import BlockOutput
from rlm_broker.sandbox.blocks.sent import Held, sent
from rlm_broker.sandbox.blocks.submit_fields import SubmitFields
from rlm_broker.transport.session import Wanted
from rlm_broker.values.text import as_json, jsonable
from sandbox_worker.wire.messages import MAX_DRAFT_CHARS, Result

MAX_ERROR_CHARS = 2_000
"""Characters of the sentence on how a block ended; a longer one is cut. The REPL's own code sends fewer."""


def ended(
    code: str,
    output: BlockOutput,
    result: Result,
    limit: str | None,
    wanted: Wanted,
    fields: SubmitFields | None,
    execution_time: float,
) -> Block:
    """Return a block whose REPL said how it ended. Its values are decoded when they are first looked at.

    Args:
        code: Source of the block.
        output: Its output so far.
        result: Result that the REPL sent.
        limit: Name of the limit that interrupted the block; None if none did.
        wanted: Values that were wanted of it.
        fields: Fields that it had to submit. If it had any, only checked values of them count as submitted.
        execution_time: Seconds that it took.
    """
    stdout, stderr = output.finish()
    final_answer = result.final_answer
    final_value: Sent | None = sent(result.final_value, result.final_value_problem)
    if fields is not None and fields.names:
        if final_answer is not None:  # made anew of the checked values: the REPL's own text is untrusted
            final_answer = None if fields.values is None else as_json(jsonable(fields.values))
        final_value = Held(fields.values)
    block = Block(
        code=code,
        status=result.status,
        stdout=stdout,
        stderr=stderr,
        error=result.error and result.error[:MAX_ERROR_CHARS],
        exit_code=result.exit_code,
        final_answer=final_answer,
        draft=result.draft and result.draft[:MAX_DRAFT_CHARS],
        limit=limit if result.status == "interrupted" else None,
        execution_time=execution_time,
        displays=tuple(output.displays),
        displays_omitted=result.displays_omitted,
        variables=tuple(Variable(each.name, each.type, each.size) for each in result.variables if wanted.variables),
    )
    return with_values(
        block,
        sent(result.value, result.value_problem) if wanted.value or wanted.names else None,
        None if final_answer is None else final_value,
    )


def killed(
    code: str, output: BlockOutput, why: str, seen: PostMortem, limit: str | None, execution_time: float
) -> Block:
    """Return a block whose REPL was killed.

    Args:
        code: Source of the block.
        output: Its output so far.
        why: Reason of the kill, as one clause.
        seen: State of the REPL just before, as init saw it.
        limit: Name of the limit that was reached; None if none was.
        execution_time: Seconds that it took.
    """
    stdout, stderr = output.finish()
    sentence = post_mortem.sentence(why, seen)
    return Block(
        code,
        "killed",
        stdout,
        stderr,
        sentence,
        execution_time=execution_time,
        limit=limit,
        post_mortem=seen,
        displays=tuple(output.displays),
    )
