"""A server that cannot show who it is gets neither the key nor a question."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from awpo.config import EndpointConfig
from awpo.endpoint import Endpoint
from awpo.endpoint_answers import EndpointError
from awpo.endpoint_connections import _ssl_context

KEY = "sk-planted-0123456789"


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    """Whom a process trusts is read once."""
    _ssl_context.cache_clear()
    yield
    _ssl_context.cache_clear()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Key and certificate of 127.0.0.1, signed by nobody else."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "server.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def server(certificate: Path) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the requests that it read."""
    read: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            read.append(str(self.headers))
            self.rfile.read(int(self.headers["Content-Length"]))
            body = b'{"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(HTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that hangs up is what is looked for."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listening = Server(("127.0.0.1", 0), Handler)
    listening.socket = context.wrap_socket(listening.socket, server_side=True)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"https://127.0.0.1:{listening.server_port}/v1", read
    listening.shutdown()
    thread.join()
    listening.server_close()


def ask(url: str) -> str:
    async def once() -> str:
        async with Endpoint(EndpointConfig(base_url=url, model="m", attempts=1, cache="off")) as client:
            return await client.chat([{"role": "user", "content": "Hi"}])

    return asyncio.run(once())


def test_a_certificate_that_nobody_vouches_for_is_refused(
    server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, read = server
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(EndpointError, match=r"cannot be reached .*certificate"):
        ask(url)
    assert read == []


def test_one_that_the_machine_trusts_is_taken(
    server: tuple[str, list[str]], certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, read = server
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert ask(url) == "Hello"
    assert KEY in read[0]
