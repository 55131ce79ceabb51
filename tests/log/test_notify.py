"Messages about a run; mail goes through a server on this machine."

import socket
import ssl
import warnings
from datetime import datetime, timedelta, timezone
from email import message_from_bytes, policy

import pytest

import isaac_loop.log.code_version as provenance
from isaac_loop.log.experiment import ExperimentCB
from isaac_loop.log.notify import Email, NotifyCB
from isaac_loop.log.upload import UploadCB
from isaac_loop.loop.events import CancelFitException
from runs import Cut, fit
from experiments import small


@pytest.fixture(autouse=True)
def no_git_of_the_tests(monkeypatch, request):
    "Most tests need no git, and asking it a hundred times takes seconds"
    if "git" not in request.node.name:
        monkeypatch.setattr(provenance, "_git", lambda *args: None)


# ---- messages


class Box:
    "Keeps the mails that come in"

    def __init__(self):
        self.mails = []

    async def handle_DATA(self, server, session, envelope):
        self.mails.append(message_from_bytes(envelope.content, policy=policy.default))
        self.rcpt = envelope.rcpt_tos
        return "250 OK"


@pytest.fixture
def mail_server():
    "Starts mail servers on free ports of this machine"
    from aiosmtpd.controller import Controller

    class FreePort(Controller):
        def _trigger_server(self):
            self.port = self.server.sockets[0].getsockname()[1]
            super()._trigger_server()

    running = []

    def start(**options):
        box = Box()
        running.append(FreePort(box, hostname="127.0.0.1", port=0, **options))
        running[-1].start()
        return box, running[-1].port

    yield start
    for o in running:
        o.stop()


@pytest.mark.shows("AIT-28")
def test_rows_hyper_parameters_and_curves_come_by_mail(tmp_path, mail_server):
    "After each epoch and at the end"
    box, port = mail_server()
    trainer = small(
        ExperimentCB(tmp_path, "digits", "wide", hyper=dict(width=256)),
        NotifyCB(Email("127.0.0.1", port, "gpu@x.org", ["me@x.org", "you@x.org"], tls=None)),
    )
    trainer.fit(2)
    assert [o["Subject"] for o in box.mails] == [
        "Epoch 1 of 2: digits/wide",
        "Epoch 2 of 2: digits/wide",
        "Finished: digits/wide",
    ]
    assert box.rcpt == ["me@x.org", "you@x.org"] and box.mails[0]["From"] == "gpu@x.org"
    text = box.mails[-1].get_body().get_content()
    assert (
        "width: 256" in text
        and f"{trainer.history.latest('valid_loss'):.3f}" in text
        and "n_updates: 6" in text
    )
    attached = {o.get_filename(): o for o in box.mails[-1].iter_attachments()}
    assert attached["history.png"].get_content_type() == "image/png" and attached[
        "history.png"
    ].get_content().startswith(b"\x89PNG")
    assert "valid_loss" in attached["history.txt"].get_content()


def certificate(folder):
    "A key and a certificate for this machine, signed by itself"
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    import ipaddress

    key, name, now = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "here")]),
        datetime.now(timezone.utc),
    )
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    made = made.add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
    ).sign(key, hashes.SHA256())
    file = folder / "certificate.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    return server, ssl.create_default_context(cafile=file)


@pytest.mark.parametrize("tls", ["starttls", "ssl"])
@pytest.mark.filterwarnings("ignore:Requiring AUTH")  # Of the server
def test_a_login_goes_through_an_encrypted_line_only(tls, tmp_path, mail_server, monkeypatch):
    from aiosmtpd.smtp import AuthResult

    monkeypatch.setattr("isaac_loop.log.notify.history_figure", lambda rows: None)  # Slow
    seen = []

    def authenticator(server, session, envelope, mechanism, data):
        seen.append((session.ssl is not None or tls == "ssl", data.login, data.password))
        return AuthResult(success=data.password == b"p4ss", handled=False)

    theirs, ours = certificate(tmp_path)
    options = (
        dict(tls_context=theirs, require_starttls=True) if tls == "starttls" else dict(ssl_context=theirs)
    )
    box, port = mail_server(
        authenticator=authenticator, auth_required=True, auth_require_tls=tls == "starttls", **options
    )

    def email(password):
        return Email(
            "127.0.0.1", port, "a@x.org", "b@x.org", user="me", password=password, tls=tls, context=ours
        )

    email("p4ss")("Hello", "text", {})
    assert seen == [(True, b"me", b"p4ss")] and box.mails[0].get_content().strip() == "text"
    trainer = small(NotifyCB(email("wr0ng")))
    with pytest.warns(UserWarning, match="could not send a message .SMTPAuthenticationError") as warned:
        trainer.fit(1)
    assert "wr0ng" not in str(warned[0].message) and len(box.mails) == 1
    tried = len(seen)
    untrusting = Email("127.0.0.1", port, "a@x.org", "b@x.org", user="me", password="p4ss", tls=tls)
    with pytest.raises(ssl.SSLError):
        untrusting("Hello", "text", {})
    assert len(seen) == tried, "no password for a server with a certificate that nobody knows"


def test_an_email_that_could_not_work_is_refused():
    for bad, match in (
        (dict(tls="tls"), "`tls` is"),
        (dict(user="me"), "both `user` and `password`"),
        (dict(user="me", password="x", tls=None), "readable by everybody"),
        (dict(recipients=[]), "empty"),
    ):
        with pytest.raises(ValueError, match=match):
            Email(**{**dict(host="mail.x.org", port=25, sender="a@x.org", recipients="b@x.org"), **bad})
    for bad in ("me@x.org", None):
        with pytest.raises(TypeError, match="cannot be called"):
            NotifyCB(bad)
    with pytest.raises(TypeError, match="does not take that"):
        NotifyCB(lambda subject: None)
    with pytest.raises(ValueError, match="`every` is 0"):
        NotifyCB(print, every=0)


def test_a_server_that_is_down_costs_one_warning(monkeypatch):
    monkeypatch.setattr("isaac_loop.log.notify.history_figure", lambda rows: None)  # Slow
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # Taken, and nobody listens
        trainer = small(NotifyCB(Email("127.0.0.1", s.getsockname()[1], "a@x.org", "b@x.org", tls=None)))
        with pytest.warns(UserWarning, match="could not send a message .*Training goes on") as seen:
            trainer.fit(3)
    assert len(seen) == 1 and len(trainer.history) == 3
    tries = []

    def send(subject, text, files):
        tries.append(subject)
        if len(tries) == 1:
            raise TimeoutError

    with pytest.warns(UserWarning):
        small(NotifyCB(send)).fit(2)
    assert len(tries) == 3, "later messages are tried"


@pytest.mark.parametrize(
    "way, word, reason",
    [
        ("error", "Failed", "Cut: pulled"),
        ("cancel", "Cancelled", "enough"),
        ("stop", "Stopped", "time is up"),
        ("interrupt", "Interrupted", "KeyboardInterrupt"),
        ("end", "Finished", ""),
    ],
)
def test_every_end_is_told_in_its_own_word(way, word, reason, monkeypatch):
    monkeypatch.setattr("isaac_loop.log.notify.history_figure", lambda rows: None)
    sent = []

    def before_backward(trainer):
        if trainer.epoch != 1:
            return
        if way == "error":
            raise Cut("pulled")
        if way == "cancel":
            raise CancelFitException("enough")
        if way == "interrupt":
            raise KeyboardInterrupt
        if way == "stop":
            trainer.request_stop("time is up")

    trainer = small(NotifyCB(lambda *args: sent.append(args), every=2), before_backward)
    try:
        trainer.fit(3)
    except (Cut, KeyboardInterrupt):
        pass
    assert sent[-1][0] == f"{word}: Linear" and reason in sent[-1][1]
    assert ("Traceback" in sent[-1][1]) == (way == "error")
    assert len(sent) == (2 if way in ("stop", "end") else 1)
    quiet = []
    trainer = small(NotifyCB(lambda *args: quiet.append(args), every=None, end=False), before_backward)
    try:
        trainer.fit(3)
    except (Cut, KeyboardInterrupt):
        pass
    assert len(quiet) == (way == "error")


def test_a_second_ctrl_c_waits_for_no_server(tmp_path, far):
    class HurryCB:
        hurried = False

        def before_step(self, trainer):
            self.hurried = True
            raise KeyboardInterrupt

    sent = []
    (tmp_path / "a.txt").touch()
    trainer = small(UploadCB("memory://far", tmp_path), NotifyCB(lambda *args: sent.append(args)), HurryCB())
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(1)
    assert far.take() == [] and sent == []


def test_an_interrupt_while_copying_loses_nothing_that_was_copied(tmp_path, far):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name)

    def stop(name, path):
        if path.endswith("b.txt"):
            raise KeyboardInterrupt

    far.fail = stop
    with pytest.raises(KeyboardInterrupt):
        small(UploadCB("memory://far", tmp_path)).fit(1)
    far.fail = lambda name, path: False
    assert [o[1] for o in far.take()][:1] == ["a.txt"]
    small(UploadCB("memory://far", tmp_path)).fit(1)
    assert sorted(o[1] for o in far.take()) == ["b.txt", "c.txt"]


@pytest.mark.parametrize("far", ["here", "here/b", "here/deep/er"])
def test_a_folder_is_not_copied_into_itself(far, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "x").write_text("x")
    for url in (str(tmp_path / far), (tmp_path / far).as_uri()):
        with pytest.raises(ValueError, match="the same folder or inside it"):
            small(UploadCB(url, tmp_path / "here")).fit(1)
    assert sorted(o.name for o in (tmp_path / "here").iterdir()) == ["x"]
    fit(small(UploadCB(str(tmp_path / "herein"), tmp_path / "here")), 2)
    assert (tmp_path / "herein" / "x").read_text() == "x", "a name that begins alike is another place"


def test_an_experiment_is_not_copied_onto_itself(tmp_path):
    with pytest.raises(ValueError, match="the same folder or inside it"):
        small(ExperimentCB(tmp_path, "p"), UploadCB(str(tmp_path))).fit(1)


def test_a_folder_in_which_there_never_was_a_file_is_mentioned(tmp_path):
    with pytest.warns(UserWarning, match="never found a file in"):
        small(UploadCB("memory://far", tmp_path / "missing")).fit(1)

    def log(trainer):
        (tmp_path / "late").write_text("x")

    fit(small(UploadCB("memory://far", tmp_path), log), 2)


@pytest.mark.parametrize("every", [1, None])
def test_a_message_may_cancel_the_fit_and_not_its_end(every):
    told = []

    def send(subject, text, files):
        told.append(subject)
        raise CancelFitException("enough")

    trainer = small(NotifyCB(send, every=every))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(3)
    assert len(trainer.history) == (1 if every else 3) and len(told) == (2 if every else 1)
