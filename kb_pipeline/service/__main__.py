"""The process: ``python -m kb_pipeline.service HOST``. Ends with SIGTERM, after the requests that it is answering."""

import logging
import sys

import uvicorn

from kb_pipeline.service.app import make_app
from kb_pipeline.service.database import Database
from kb_pipeline.settings import load_settings


def main(host: str) -> None:
    settings = load_settings()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    database = Database(settings)
    try:
        uvicorn.run(
            make_app(settings, database),
            host=host,
            port=settings.service_port,
            log_level="warning",
            timeout_graceful_shutdown=5,
        )
    finally:
        database.close()


if __name__ == "__main__":
    main(sys.argv[1])
