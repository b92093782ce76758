"""Settings of the server, and what it holds from the beginning."""

import os
import socket
from pathlib import Path

DATABASES = ("kb", "dagster")
_EXTENSIONS = ("vector", "pg_trgm", "pg_stat_statements")
_MIB = 2**20


def configuration(port: int) -> str:
    """kb.conf for this machine as it is now."""
    memory = _memory_bytes() // _MIB
    maintenance = min(max(memory // 16, 64), 1024)
    settings: dict[str, str | int] = {
        "port": port,
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "password_encryption": "scram-sha-256",
        "max_connections": 200,
        "max_locks_per_transaction": 512,  # a statement over many partitions locks each of them
        "shared_buffers": f"{min(max(memory // 8, 32), 256)}MB",
        "maintenance_work_mem": f"{maintenance}MB",  # an HNSW build that does not fit becomes many times slower
        "autovacuum_work_mem": f"{min(maintenance, 128)}MB",
        "max_parallel_maintenance_workers": 2,
        "dynamic_shared_memory_type": _shared_memory_type(2 * maintenance * _MIB),
        "autovacuum_naptime": "15s",  # the heads of the queues are dead rows after seconds
        "max_wal_size": "2GB",
        "synchronous_commit": "on",
        "jit": "off",
        "timezone": "UTC",
        "shared_preload_libraries": "pg_stat_statements",
        "logging_collector": "on",
        "log_directory": "../logs",
        "log_filename": "postgres-%a.log",  # one file a weekday, overwritten after a week
        "log_truncate_on_rotation": "on",
        "log_rotation_age": "1d",
        "log_rotation_size": 0,
        "log_timezone": "UTC",
        "log_line_prefix": "%m [%p] ",
        "log_checkpoints": "off",
    }
    return "".join(f"{name} = {value if isinstance(value, int) else repr(value)}\n" for name, value in settings.items())


def first_statements(password: str) -> str:
    """For single-user mode, which ends a statement at a semicolon and an empty line; ``password`` is hexadecimal.

    ``kb`` may create databases, see all statistics and run checkpoints, and is no superuser.
    """
    statements = [
        f"CREATE ROLE kb LOGIN CREATEDB PASSWORD '{password}'",
        "GRANT pg_monitor, pg_checkpoint, pg_signal_backend TO kb",
        *(f"CREATE EXTENSION {name}" for name in _EXTENSIONS),
        "GRANT EXECUTE ON FUNCTION pg_stat_statements_reset TO kb",
        *(f"CREATE DATABASE {name} OWNER kb" for name in DATABASES),
    ]
    return "".join(f"{statement};\n\n" for statement in statements)


def free_port(preferred: int | None) -> int:
    """``preferred`` if nothing listens there, else any."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as PostgreSQL does: TIME_WAIT does not count
        try:
            s.bind(("127.0.0.1", preferred or 0))
        except OSError:
            return free_port(None)
        return int(s.getsockname()[1])


def _memory_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()).isdigit():
            memory = min(memory, int(text))
    return memory


def _shared_memory_type(needed_bytes: int) -> str:
    """Containers often have 64 MB in /dev/shm, in which a parallel HNSW build fails; System V memory has no such limit."""
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return "sysv"
    return "posix" if shm.f_frsize * shm.f_blocks >= needed_bytes else "sysv"
