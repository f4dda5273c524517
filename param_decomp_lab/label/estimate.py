"""`pd label --dry-run`: shows one prompt, and estimates the total cost. Sends no request, and writes nothing."""

import itertools

from rich.console import Console

from param_decomp_lab.label.command import unlabelled
from param_decomp_lab.label.draws import Draws
from param_decomp_lab.label.endpoint import Endpoint
from param_decomp_lab.label.judging import score_questions
from param_decomp_lab.label.ledger import spent_so_far
from param_decomp_lab.label.money import dollars, expected_tokens
from param_decomp_lab.label.naming import label_question
from param_decomp_lab.label.place import LabelledRun
from param_decomp_lab.label.score_command import ScoreRequest, find_jobs
from param_decomp_lab.label.session import Request

ESTIMATED_FROM = 20
"""The number of components from whose questions the total is estimated."""
ANSWER_TOKENS = 100
"""Tokens of a typical answer, within its limit, from a model that does not reason first."""


def dry_run(
    run: LabelledRun, endpoint: Endpoint, request: Request, wanted: ScoreRequest | None, console: Console
) -> None:
    if wanted is None:
        chosen = unlabelled(run, request)
        questions = [label_question(run.texts, component) for component in chosen[:ESTIMATED_FROM]]
        count, what = len(chosen), f"{len(chosen):,} components to label"
    else:
        draws = Draws(run.texts, wanted.seed, wanted.texts)
        todo = [job for job in find_jobs(run, endpoint, request, wanted, draws) if not job.is_known]
        some = todo[: ESTIMATED_FROM * len(wanted.kinds)]
        by_job = [list(score_questions(run.texts, draws, job.kind, job.component, job.label)) for job in some]
        questions = [question for question, _ in itertools.chain.from_iterable(by_job)]
        count = round(len(questions) * len(todo) / max(1, len(some)))
        what = f"{len(todo):,} scores to find"
    if questions:
        for message in questions[0].messages:
            console.print(f"--- {message['role']}\n{message['content']}", highlight=False, soft_wrap=True)
        console.print("---", highlight=False)
    expected = [
        endpoint.prices.cost(expected_tokens(q.messages), min(ANSWER_TOKENS, endpoint.max_tokens)) for q in questions
    ]
    largest = [endpoint.largest_cost(q.messages) for q in questions]
    scale = count / max(1, len(questions))
    console.print(
        f"{what}, {count:,} requests to {endpoint.model}: about {dollars(round(sum(expected) * scale))}, at most "
        f"{dollars(round(sum(largest) * scale))} if each is answered at once. Spent on this run so far: "
        f"{dollars(spent_so_far(run.folder))} of {dollars(request.cap)}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
