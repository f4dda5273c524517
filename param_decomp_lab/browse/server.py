"""The server of the browser: addresses, what may be asked and by whom, and how errors are shown.

Requests are answered one after the other on the event loop: a page takes a few milliseconds, and the readers of Parquet
files need no locks. Only a text that is run, and a search of all sites, wait elsewhere. The first list of all
components reads the tables of all sites, and keeps other readers waiting for a second or so with a million components.
"""

import asyncio
import base64
import hashlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from param_decomp_lab.browse.baselines_page import baselines_page
from param_decomp_lab.browse.catalog import Catalog, Opened
from param_decomp_lab.browse.component_list import Query
from param_decomp_lab.browse.effect_page import EffectPages
from param_decomp_lab.browse.graph_pages import DRAWN, GraphPages, View
from param_decomp_lab.browse.group_pages import GroupPages, GroupQuery
from param_decomp_lab.browse.heads_page import HeadsPages
from param_decomp_lab.browse.intervention_page import InterventionPages
from param_decomp_lab.browse.matched_page import MatchedPages, PairQuery, known_harvest
from param_decomp_lab.browse.nearest_page import NearestPages
from param_decomp_lab.browse.pages import NotThere, Pages, address, line_feeds
from param_decomp_lab.browse.text_page import TextPages, Workers
from param_decomp_lab.browse.text_worker import GraphQuestion
from param_decomp_lab.errors import CannotWrite, UserError
from param_decomp_lab.harvest.files.search import trimmed
from param_decomp_lab.report.write import render_report

HERE = Path(__file__).parent
LOCAL = ("localhost", "localhost.localdomain", "ip6-localhost")
FORM_BYTES = 1 << 16
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
Handler = Callable[[Request], Awaitable[Response]]


def make_app(folders: Sequence[Path], hosts: Sequence[str] = ()) -> Starlette:
    """The browser of the runs in ``folders``. ``hosts``: names, besides those of this machine, that a request may use
    for it. Raises UserError where there is nothing to show."""
    files = static_files()
    version = hashlib.sha256(b"".join(content for content, _ in files.values())).hexdigest()[:12]
    catalog = Catalog(folders)
    pages = Pages(catalog, f"/static/{version}")
    workers = Workers()
    texts, graphs = TextPages(pages, workers), GraphPages(pages, workers)
    interventions = InterventionPages(pages, workers)
    group_pages, nearest_pages = GroupPages(pages), NearestPages(pages, workers)
    heads_pages = HeadsPages(pages, workers)
    effects, matched_pages = EffectPages(pages, workers), MatchedPages(pages, workers, catalog)

    def of_harvest(handler: Callable[[Request, Opened], Awaitable[Response]]) -> Handler:
        @wraps(handler)
        async def found(request: Request) -> Response:
            try:
                opened = catalog.harvest(request.path_params["run"], request.path_params["harvest"])
            except UserError as error:
                raise NotThere(str(error)) from error
            return await handler(request, opened)

        return found

    async def runs(request: Request) -> Response:
        return HTMLResponse(pages.runs(_page(request)))

    @of_harvest
    async def harvest(request: Request, opened: Opened) -> Response:
        if trimmed(request.query_params.get("search", "")):  # what this page once searched
            return RedirectResponse(
                address(opened.run, opened.name, "components", search=request.query_params["search"]), 303
            )
        return HTMLResponse(pages.harvest(opened, _page(request)))

    @of_harvest
    async def components(request: Request, opened: Opened) -> Response:
        query, page = Query.parse(request.query_params), _page(request)
        if not query.search:
            return HTMLResponse(pages.all_components(opened, query, page))
        # The first one reads the tokens of all sites, for seconds. What the thread needs besides is read before.
        _ = opened.all_components, opened.harvest.vocabulary, opened.harvest.input_totals
        return HTMLResponse(await asyncio.to_thread(pages.all_components, opened, query, page))

    @of_harvest
    async def site(request: Request, opened: Opened) -> Response:
        name = _site(request, opened)
        wanted = request.query_params.get("go", "").strip()
        if wanted:
            return RedirectResponse(address(opened.run, opened.name, "sites", name, _number(wanted)), 303)
        return HTMLResponse(pages.site(opened, name, Query.parse(request.query_params), _page(request)))

    @of_harvest
    async def component(request: Request, opened: Opened) -> Response:
        name, n = _site(request, opened), _number(request.path_params["component"])
        query = Query.parse(request.query_params)
        return HTMLResponse(pages.component(opened, name, n, query, bool(request.query_params)))

    @of_harvest
    async def label(request: Request, opened: Opened) -> Response:
        name, n = _site(request, opened), _number(request.path_params["component"])
        if not n < opened.harvest.site(name).C:
            raise NotThere(f"{name} has no component {n:,}")
        form = await _form(request)
        opened.labels.set(name, n, form.get("text", ""), form.get("author", ""))
        query = Query.parse(request.query_params).address
        return RedirectResponse(address(opened.run, opened.name, "sites", name, n, **query), 303)

    @of_harvest
    async def text(request: Request, opened: Opened) -> Response:
        given = _typed(request.query_params)
        if given.get("of"):
            name, _, number = given["of"].rpartition(":")
            asked = given.get("text", ""), _known_site(name, opened), _number(number)
            return HTMLResponse(await asyncio.to_thread(texts.of_component, opened, *asked))
        at = _number(given["at"]) if given.get("at") else None
        return HTMLResponse(await asyncio.to_thread(texts.page, opened, given.get("text", ""), at, given.get("by", "")))

    @of_harvest
    async def graph_list(request: Request, opened: Opened) -> Response:
        del request
        return HTMLResponse(await asyncio.to_thread(graphs.listing, opened))

    @of_harvest
    async def kept_graph(request: Request, opened: Opened) -> Response:
        name, view = request.path_params["graph"], _view(request)
        return HTMLResponse(await asyncio.to_thread(graphs.kept, opened, name, view))

    @of_harvest
    async def graph(request: Request, opened: Opened) -> Response:
        question, view = _graph_question(_typed(request.query_params)), _view(request)
        if not question.prompt:
            return HTMLResponse(await asyncio.to_thread(graphs.listing, opened))
        return HTMLResponse(await asyncio.to_thread(graphs.of_prompt, opened, question, view))

    @of_harvest
    async def keep_graph(request: Request, opened: Opened) -> Response:
        form = await _form(request)
        return RedirectResponse(await asyncio.to_thread(graphs.keep, opened, _graph_question(form)), 303)

    @of_harvest
    async def intervene(request: Request, opened: Opened) -> Response:
        return HTMLResponse(await asyncio.to_thread(interventions.page, opened, _typed(request.query_params)))

    @of_harvest
    async def nearest(request: Request, opened: Opened) -> Response:
        given = request.query_params
        name = _known_site(given.get("site", ""), opened)
        number = _number(given.get("component", ""))
        other = known_harvest(catalog, given["other"], given.get("at", "")) if given.get("other") else None
        return HTMLResponse(await asyncio.to_thread(nearest_pages.page, opened, name, number, other))

    @of_harvest
    async def match_choice(request: Request, opened: Opened) -> Response:
        given = request.query_params
        name = _known_site(given["site"], opened) if given.get("site") else ""
        number = _number(given["component"]) if name and given.get("component") else None
        return HTMLResponse(await asyncio.to_thread(matched_pages.choose, opened, name, number))

    @of_harvest
    async def matched(request: Request, opened: Opened) -> Response:
        asked = opened, _other(request), _page(request)
        return HTMLResponse(await asyncio.to_thread(matched_pages.overview, *asked))

    @of_harvest
    async def matched_site(request: Request, opened: Opened) -> Response:
        asked = opened, _other(request), _site(request, opened), PairQuery.parse(request.query_params), _page(request)
        return HTMLResponse(await asyncio.to_thread(matched_pages.site, *asked))

    @of_harvest
    async def matched_pair(request: Request, opened: Opened) -> Response:
        asked = opened, _other(request), _site(request, opened), _number(request.path_params["component"])
        return HTMLResponse(await asyncio.to_thread(matched_pages.pair, *asked))

    def _other(request: Request) -> Opened:
        return known_harvest(catalog, request.path_params["other"], request.path_params["other_harvest"])

    @of_harvest
    async def heads(request: Request, opened: Opened) -> Response:
        given = _typed(request.query_params)
        name, number = _known_site(given.get("site", ""), opened), _number(given.get("component", ""))
        return HTMLResponse(await asyncio.to_thread(heads_pages.page, opened, name, number, given.get("text", "")))

    @of_harvest
    async def effect(request: Request, opened: Opened) -> Response:
        given = request.query_params
        name = _known_site(given.get("site", ""), opened)
        number = _number(given.get("component", ""))
        return HTMLResponse(
            await asyncio.to_thread(effects.page, opened, name, number, given.get("by") == "probability")
        )

    @of_harvest
    async def groups(request: Request, opened: Opened) -> Response:
        return HTMLResponse(group_pages.groups(opened, GroupQuery.parse(request.query_params), _page(request)))

    @of_harvest
    async def group(request: Request, opened: Opened) -> Response:
        number = _number(request.path_params["group"])
        return HTMLResponse(group_pages.group(opened, number, _page(request)))

    @of_harvest
    async def baselines(request: Request, opened: Opened) -> Response:
        del request
        return HTMLResponse(baselines_page(pages, opened))

    @of_harvest
    async def report(request: Request, opened: Opened) -> Response:
        def component_address(site: str, number: int) -> str:
            name = site.removeprefix("model.").removesuffix(".weight")
            known = name in opened.harvest.sites and 0 <= number < opened.harvest.site(name).C
            return address(opened.run, opened.name, "sites", name, number) if known else ""

        page = await asyncio.to_thread(render_report, opened.run_folder, component_address)
        return HTMLResponse(page, headers={"content-security-policy": _report_policy(page)})

    async def static(request: Request) -> Response:
        if request.path_params["version"] != version or request.path_params["file"] not in files:
            raise NotThere("there is no such file")
        content, kind = files[request.path_params["file"]]
        return Response(content, media_type=kind, headers={"cache-control": "max-age=31536000, immutable"})

    def refusal(status: int, title: str) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def say(request: Request, error: Exception) -> Response:
            del request
            return HTMLResponse(pages.message(title, str(error)), status)

        return say

    async def other(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        title = "Not found" if error.status_code == 404 else "Not possible"
        said = f"{error.detail}: {request.method} {request.url.path}"
        return HTMLResponse(pages.message(title, said), error.status_code)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        yield
        workers.close()

    return Starlette(
        routes=[
            Route("/", runs),
            Route("/static/{version}/{file}", static),
            Route("/{run}/{harvest}", harvest),
            Route("/{run}/{harvest}/components", components),
            Route("/{run}/{harvest}/text", text),
            Route("/{run}/{harvest}/graphs", graph_list),
            Route("/{run}/{harvest}/graphs/{graph}", kept_graph),
            Route("/{run}/{harvest}/graph", graph),
            Route("/{run}/{harvest}/graph", keep_graph, methods=["POST"]),
            Route("/{run}/{harvest}/intervene", intervene),
            Route("/{run}/{harvest}/baselines", baselines),
            Route("/{run}/{harvest}/report", report),
            Route("/{run}/{harvest}/nearest", nearest),
            Route("/{run}/{harvest}/matched", match_choice),
            Route("/{run}/{harvest}/matched/{other}/{other_harvest}", matched),
            Route("/{run}/{harvest}/matched/{other}/{other_harvest}/{site}", matched_site),
            Route("/{run}/{harvest}/matched/{other}/{other_harvest}/{site}/{component}", matched_pair),
            Route("/{run}/{harvest}/heads", heads),
            Route("/{run}/{harvest}/effect", effect),
            Route("/{run}/{harvest}/groups", groups),
            Route("/{run}/{harvest}/groups/{group}", group),
            Route("/{run}/{harvest}/sites/{site}", site),
            Route("/{run}/{harvest}/sites/{site}/{component}", component),
            Route("/{run}/{harvest}/sites/{site}/{component}/label", label, methods=["POST"]),
        ],
        middleware=[
            Middleware(Guard, hosts=frozenset(name.lower() for name in (*LOCAL, socket.gethostname(), *hosts))),
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5),
        ],
        exception_handlers={
            NotThere: refusal(404, "Not found"),
            UserError: refusal(400, "Not possible"),
            CannotWrite: refusal(409, "Not kept"),
            HTTPException: other,
            Exception: refusal(500, "This page failed"),
        },
        lifespan=lifespan,
    )


class Guard:
    """Answers only requests that name this machine, and edits only from its own pages; adds the headers of safety.

    A page elsewhere may send a browser here under a name of its own that it lets point at this machine (DNS
    rebinding). Such a request names that host, and is refused; an address in numbers cannot be made to point elsewhere.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                added = [
                    (name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given
                ]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        why = self._refuse(Request(scope))
        if why:
            await Response(why, 403, media_type="text/plain")(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)

    def _refuse(self, request: Request) -> str:
        """Why a request is not answered; "" if it is."""
        hosts = request.headers.getlist("host")
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not (name in self._hosts or _is_numeric(name)):
            return "pd browse answers only to the names of this machine (--host adds one)"
        if request.method not in ("GET", "HEAD"):
            origin = request.headers.get("origin")
            if origin is not None and origin.partition("://")[2] != hosts[0]:
                return "pd browse takes edits only from its own pages"
            if origin is None and request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
                return "pd browse takes edits only from its own pages"
        return ""


def _host_name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_numeric(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _report_policy(page: str) -> str:
    """A report is one file, with its style and its script inside: no other script runs."""
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def static_files() -> dict[str, tuple[bytes, str]]:
    """Content and type of the files that all pages use, by name."""
    shared = (HERE.parent / "ui" / "base.css").read_bytes()
    return {
        "browse.css": (shared + (HERE / "browse.css").read_bytes(), "text/css"),
        "browse.js": ((HERE / "browse.js").read_bytes(), "text/javascript"),
        "graph.js": ((HERE / "graph.js").read_bytes(), "text/javascript"),
        "icon.svg": ((HERE / "icon.svg").read_bytes(), "image/svg+xml"),
    }


def _site(request: Request, opened: Opened) -> str:
    return _known_site(request.path_params["site"], opened)


def _known_site(name: str, opened: Opened) -> str:
    try:
        opened.harvest.site(name)
    except UserError as error:
        raise NotThere(str(error)) from error
    return name


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise NotThere(f"'{text[:40]}' is not a number")
    return int(text)


def _page(request: Request) -> int:
    return max(1, _number(request.query_params.get("page") or "1"))


def _view(request: Request) -> View:
    given = request.query_params
    edges = max(1, _number(given.get("edges") or str(DRAWN)))  # none would leave nothing to double
    return View(given.get("node", ""), bool(given.get("groups")), edges)


def _graph_question(given: Mapping[str, str]) -> GraphQuestion:
    return GraphQuestion(given.get("prompt", ""), given.get("target", ""), bool(given.get("optimize")))


def _typed(given: Mapping[str, str]) -> dict[str, str]:
    """Fields as they were typed: browsers send each line break of a form as CR LF."""
    return {name: line_feeds(text) for name, text in given.items()}


async def _form(request: Request) -> Mapping[str, str]:
    """The fields of a form. Raises UserError for one that is too large, or no form."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > FORM_BYTES:
            raise UserError(f"a form may have {FORM_BYTES:,} bytes")
    try:
        fields = parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=10)
    except (UnicodeDecodeError, ValueError) as error:
        raise UserError("this is not a form in UTF-8") from error
    return _typed(dict(fields))
