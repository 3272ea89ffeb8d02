"""A site of a job and its server, without NVFlare: who may call, and who waits for whom."""

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apfed_protocols.errors import PartyLeftError
from apfed_protocols.seal import fresh_identity
from secure_apfed.errors import ConfigError
from secure_apfed.runs.party_file import PartyFile
from tests.links.jobs import OPEN, WAIT, Job, job_of, needs_nvflare
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
    needs_nvflare,
]


class Facade:
    """What a site sees of NVFlare in a call, where no job is.

    Attributes:
        told: by peer, what it heard of this party's end.
    """

    def __init__(self, job: Job, caller: str) -> None:
        self.site_name, self.caller = "active", caller
        self.context = SimpleNamespace(abort_signal=SimpleNamespace(triggered=False))
        self.told: dict[str, str] = {}
        self.other_clients = [self._peer(name) for name in job.files if name != "active"]

    def _peer(self, name: str) -> Any:
        peer = SimpleNamespace(
            carry=lambda *frame: False, stopped=lambda why: self.told.update({name: why})
        )
        return _Named(name, peer)


class _Named:
    def __init__(self, name: str, peer: Any) -> None:
        self.name, self.peer = name, peer

    def __call__(self, timeout: float) -> Any:
        return self.peer


def site_of(job: Job, caller: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Facade]:
    """The active's, called by somebody."""
    site = importlib.import_module("secure_apfed.runs.nvflare_site")
    facade = Facade(job, caller)
    monkeypatch.setattr(site, "collab", facade)
    monkeypatch.setenv(site.PARTY_FILE, str(job.files["active"]))
    return site, facade


def test_the_server_alone_starts_a_party_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, "apfed_c", **OPEN)
    module, facade = site_of(job, "passive-1", monkeypatch)
    played: list[Path] = []
    monkeypatch.setattr(module, "play_party", lambda path, **options: played.append(path))
    site = module.Site()
    with pytest.raises(module.WrongSiteError, match="once a job, by the server alone"):
        site.play()
    assert not played
    assert not facade.told
    facade.caller = "server"
    assert site.play() == ""
    with pytest.raises(module.WrongSiteError, match="once a job, by the server alone"):
        site.play()
    assert len(played) == 1
    assert set(facade.told.values()) == {"its part is over"}


def test_after_the_end_of_the_job_no_session_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has `rules.restarts` left would wait for peers that never come."""
    job = job_of(tmp_path, "apfed_c", **OPEN, rules=WAIT)
    module, facade = site_of(job, "server", monkeypatch)
    before = threading.active_count()
    aborting = threading.Timer(1.0, lambda: setattr(facade.context.abort_signal, "triggered", True))
    aborting.start()
    assert "NVFlare ended the job" in module.Site().play()
    assert "NVFlare ended the job" in job.said("active")
    told = PartyFile.read(job.files["active"])
    site = module.Site()
    monkeypatch.setattr(
        module, "play_party", lambda path, **options: meet_twice(options["meet"], told)
    )
    facade.context.abort_signal.triggered = True
    assert "NVFlare ended the job" in site.play()
    wait_until(lambda: threading.active_count() <= before + 1)  # nothing is left of them


def meet_twice(meet: Callable[..., Any], told: PartyFile) -> None:
    identity = fresh_identity()
    known = {name: bytes.fromhex(peer.identity) for name, peer in told.peers.items()}
    for _ in range(2):
        with pytest.raises(PartyLeftError, match="NVFlare ended the job"):
            meet(told, identity, known)
    meet(told, identity, known)


def test_a_job_has_no_site_of_the_servers_name() -> None:
    made = importlib.import_module("secure_apfed.runs.nvflare_job").PartyRecipe
    with pytest.raises(ConfigError, match="server is the name of NVFlare's own"):
        made(["active", "server"])


class Sites(list[Any]):
    """What the server sees of the sites of a job.

    Args:
        ends: by site, what its party returns and when; it never returns where there is nothing.
        answering: who says that its party goes on.
    """

    def __init__(self, ends: dict[str, tuple[str, float] | None], answering: set[str]) -> None:
        super().__init__(_Named(name, SimpleNamespace(playing=lambda: True)) for name in ends)
        self._ends, self._answering, self.failures = ends, answering, dict[str, Exception]()
        for site in self:
            if site.name not in answering:
                site.peer = SimpleNamespace(playing=self._silent)

    def _silent(self) -> bool:
        error = importlib.import_module("nvflare.collab.api.exceptions").CollabCallError
        raise error("site", "playing", TimeoutError())

    def __call__(self, *, process_resp_cb: Callable[[Any, str], Any], **options: Any) -> Any:
        for name, end in self._ends.items():
            if end is not None:
                call = SimpleNamespace(target_name=name)
                threading.Timer(end[1], process_resp_cb, (call, end[0])).start()
        return SimpleNamespace(play=lambda: self)


@pytest.mark.parametrize(
    ("later", "told"),
    [
        (("", 2.0), "shop: PartyLeftError: out$"),  # it went on without the shop
        (None, "shop: PartyLeftError: out; bank: it was not heard of any more$"),
    ],
)
def test_the_server_waits_for_whoever_goes_on(
    later: tuple[str, float] | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("secure_apfed.runs.nvflare_site")
    ends = {"shop": ("PartyLeftError: out", 0.1)}
    sites = Sites({**ends, "bank": later}, {"bank"} if later else set())
    monkeypatch.setattr(module, "_GRACE_S", 0.4)
    monkeypatch.setattr(module, "collab", SimpleNamespace(clients=sites, is_aborted=False))
    with pytest.raises(RuntimeError, match=told):
        module.Server().run()


def test_the_servers_log_takes_one_line_from_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("secure_apfed.runs.nvflare_site")
    sites = Sites({"shop": ("DataError: \n\x1b[2Jall is well" + "!" * 5000, 0.1)}, set())
    monkeypatch.setattr(module, "collab", SimpleNamespace(clients=sites, is_aborted=False))
    with pytest.raises(RuntimeError, match=r"^shop: DataError: \?\?\[2Jall is well!{50}") as raised:
        module.Server().run()
    assert len(str(raised.value)) < 500
