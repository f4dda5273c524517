"""The page of the attention heads in which a component lies: its shares, what the heads read, and its partners."""

from typing import Any

from param_decomp_lab.browse.catalog import Opened
from param_decomp_lab.browse.pages import NotThere, Pages, as_asked, checked_number, clean, unseen
from param_decomp_lab.browse.text_page import PATIENCE_S, WAITING, Workers
from param_decomp_lab.browse.text_worker import LONGEST, HeadsAnswer, HeadsQuestion

TEXT = (
    "When Mary and John went to the shop, John gave a drink to Mary. When Mary and John went to the park, John gave a "
    "book to Mary."
)
"""The default text, whose phrases come again."""
PARTNERS, HEADS = 8, 4
"""Partners of each list, and the heads that have lists: those in which the component has the largest shares."""
SHADED = 10


class HeadsPages:
    """Renders the heads of a component. They take the weights and the target, which a process of the run reads."""

    def __init__(self, pages: Pages, workers: Workers) -> None:
        self._pages, self._workers = pages, workers

    def page(self, opened: Opened, site: str, number: int, text: str) -> str:
        checked_number(opened, site, number)
        if site not in opened.sites_with_heads:
            raise NotThere(f"{site} is not cut into attention heads")
        text = text or TEXT
        values: dict[str, Any] = {"waiting": "", "wrong": "", "answer": None}
        if len(text) > LONGEST:
            values["wrong"] = f"a text may have {LONGEST:,} characters; this one has {len(text):,}"
        else:
            question = HeadsQuestion(site, number, text, PARTNERS, HEADS)
            answer = self._workers.of(opened).heads(question, PATIENCE_S)
            if answer is None:
                values["waiting"] = WAITING
            elif answer.wrong:
                values["wrong"] = clean(answer.wrong, 2000)
            else:
                values |= {"answer": answer, "text_wrong": clean(answer.text_wrong, 2000)} | _tables(opened, answer)
        return self._pages.render(
            "heads.html", opened=opened, site=site, n=number, text=as_asked(text[:LONGEST]), longest=LONGEST,
            unseen=unseen(text[:LONGEST]), **values,
        )  # fmt: skip


def _tables(opened: Opened, answer: HeadsAnswer) -> dict[str, Any]:
    """The rows of the heads, and the lists of partners with their tokens and labels."""
    rows = [
        {
            "head": head, "share": share, "shade": round(SHADED * share),
            "scores": [(answer.scores[name][head], _shade(answer.scores[name][head])) for name in answer.scores],
            "queries": [head * answer.served + k for k in range(answer.served)],
        }
        for head, share in enumerate(answer.shares)
    ]  # fmt: skip
    names = opened.harvest.names(answer.tokens)
    labels = opened.labels.of_site(answer.partner_site) if answer.partner_site else {}
    lists = []
    for head, partners in answer.partners.items():
        found = []
        for partner in partners:
            place = partner.on_text
            at = None if place is None else (place[0], names[place[1]], place[1], names[place[2]], place[2])
            found.append({"partner": partner, "label": labels.get(partner.number, ""), "at": at})
        lists.append((head, answer.shares[head // answer.served], found))
    known = answer.partner_site in opened.harvest.sites
    return {"rows": rows, "lists": lists, "partner_known": known, "positions": len(answer.tokens)}


def _shade(score: float | None) -> int:
    return 0 if score is None else round(SHADED * min(score, 1.0))
