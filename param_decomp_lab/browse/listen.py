"""Listens for the browser."""

import ipaddress
import socket
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import uvicorn

from param_decomp_lab.browse.server import make_app
from param_decomp_lab.errors import UserError
from param_decomp_lab.ui.console import PlainConsole

FIRST_PORT, PORTS = 8720, 30


def listen(folders: Sequence[Path], host: str, port: int | None, open_browser: bool) -> None:
    """Serves until Ctrl-C or SIGTERM. Raises UserError where there is nothing to show, or the port is taken."""
    console = PlainConsole()
    # Arrow's own pool keeps 22 to 55 MiB more of what pages have read (docs/measurements/harvest.md).
    pa.set_memory_pool(pa.system_memory_pool())
    app = make_app(folders, [host])
    bound = _bind(host, [port] if port is not None else range(FIRST_PORT, FIRST_PORT + PORTS))
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{bound.getsockname()[1]}/"
    console.print(f"{address}  (Ctrl-C ends it)", highlight=False, soft_wrap=True)
    if not _is_local(host):
        console.print(
            "everybody who can reach this machine can see it and edit labels", highlight=False, soft_wrap=True
        )
    if open_browser:
        webbrowser.open(address)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False))
    try:
        server.run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        bound.close()


def _bind(host: str, ports: Sequence[int]) -> socket.socket:
    wrong: OSError | None = None
    for port in ports:
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = socket.socket(family, kind, protocol)
        except (OSError, UnicodeError) as error:
            raise UserError(f"--host: {host}: {getattr(error, 'strerror', None) or error}") from error
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(place)
            bound.listen()
        except OSError as error:
            bound.close()
            wrong = error
        else:
            return bound
    assert wrong is not None
    where = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"
    raise UserError(f"--port: cannot listen on {where} of {host}: {wrong.strerror}; choose another") from wrong


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
