"""Pages of the browser as files: every link leads to another file, or becomes plain text."""

import posixpath
from collections.abc import Mapping
from html import escape
from html.parser import HTMLParser
from urllib.parse import parse_qsl, quote, unquote, urlsplit


def relative_page(page: str, file: str, files: Mapping[str, str]) -> str:
    """``page`` as it stands in ``file``. ``files``: by address, without the number of a first page; paths from the
    root of the folder. Everything but links stays as it is, to the byte. Raises ValueError for a style sheet, script
    or picture that is not in the folder."""
    found = _Links(file, files)
    found.feed(page)
    found.close()
    return "".join(found.parts)


class _Links(HTMLParser):
    """Copies what it reads, and changes links."""

    def __init__(self, file: str, files: Mapping[str, str]) -> None:
        super().__init__(convert_charrefs=False)
        self.parts: list[str] = []
        self._file, self._files = file, files
        self._ends: list[str] = []
        """What the links that are open end with."""
        self._svg = False

    def _relative(self, link: str) -> str | None:
        """A link as it stands in this file; None if it leads to what is not in the folder."""
        address, _, fragment = link.partition("#")
        target = self._files.get(_canonical(address)) if address else self._file
        if target is None:
            return None
        anchor = f"#{fragment}" if fragment else ""
        if target == self._file and anchor:
            return anchor
        return quote(posixpath.relpath(target, posixpath.dirname(self._file) or ".")) + anchor

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._svg = self._svg or tag == "svg"
        for name in ("href", "src"):
            link = given.get(name)
            if link is None:
                continue
            found = self._relative(link)
            if found is None:
                if tag != "a":
                    raise ValueError(f"{self._file}: {link}")
                other = "g" if self._svg else "span"
                self._ends.append(f"</{other}>")
                self.parts.append(f"<{other}>")
                return
            given[name] = found
            written = "".join(f' {k}="{escape(v)}"' if v is not None else f" {k}" for k, v in given.items())
            self.parts.append(f"<{tag}{written}>")
            break
        else:
            self.parts.append(self.get_starttag_text() or "")
        if tag == "a":
            self._ends.append("</a>")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del tag, attrs  # of a drawing: none of them is a link
        self.parts.append(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        self._svg = self._svg and tag != "svg"
        self.parts.append(self._ends.pop() if tag == "a" and self._ends else f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def handle_entityref(self, name: str) -> None:
        self.parts.append(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self.parts.append(f"&#{name};")

    def handle_decl(self, decl: str) -> None:
        self.parts.append(f"<!{decl}>")


def _canonical(address: str) -> str:
    """The address under which a page is known: without quoting, and without what does not choose another page. Lists
    in another order or selection are other pages."""
    split = urlsplit(address)
    if split.scheme or split.netloc:  # elsewhere
        return address
    path, query = unquote(split.path), dict(parse_qsl(split.query))
    query.pop("node", None)
    if query.get("page") == "1":
        del query["page"]
    is_component = path.rpartition("/")[0].rpartition("/")[0].endswith("/sites")
    if not query or is_component:  # a component's query is the list that it was opened from
        return path
    return f"{path}?page={query['page']}" if set(query) == {"page"} else f"{path}?{split.query}"
