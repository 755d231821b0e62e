"""Ask the Hugging Face Hub once, and quietly, whether it has a model or a data set: its clients retry for a minute."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

_TIMEOUT_SECONDS = 5.0

Kind = Literal["model", "dataset"]

# A file that is asked for; that it is missing says nothing of the repository.
_FILES: dict[Kind, str] = {"model": "config.json", "dataset": "README.md"}


def problem(name: str, kind: Kind) -> str:
    """Why the Hub's name cannot be loaded on this machine; empty if it may be.

    What this user's cache holds is not asked for. A Hub that answers slowly, or with another error than that there is
    no such name, is left to its own clients.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.file_download import get_hf_file_metadata

    try:
        if _is_cached(name, kind):
            return ""
        if constants.HF_HUB_OFFLINE:
            return "not in the cache of the Hugging Face Hub, which HF_HUB_OFFLINE keeps from being asked"
        with quiet_hub():
            get_hf_file_metadata(hf_hub_url(name, _FILES[kind], repo_type=kind), timeout=_TIMEOUT_SECONDS)
    except HFValidationError:
        return "no possible name on the Hugging Face Hub either"
    except RepositoryNotFoundError:
        return "the Hugging Face Hub has none of that name, or none that you may read"
    except HfHubHTTPError:
        return ""
    except Exception as error:  # of the HTTP library that huggingface_hub happens to use
        if "Timeout" in type(error).__name__:
            return ""
        return "the Hugging Face Hub cannot be reached, and its cache has none of that name"
    return ""


def _is_cached(name: str, kind: Kind) -> bool:
    if kind == "dataset":  # its library keeps another cache
        from datasets.config import HF_DATASETS_CACHE
        from datasets.naming import camelcase_to_snakecase

        *owner, own = name.split("/")  # it writes the data set's own name in small letters
        return bool((HF_DATASETS_CACHE / "___".join([*owner, camelcase_to_snakecase(own)])).is_dir())
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, _FILES[kind]), str)


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Hide the Hub client's messages about every retry of a connection."""
    import huggingface_hub  # deferred, as above: most programs ask nothing of it

    log = huggingface_hub.utils.logging
    verbosity = log.get_verbosity()
    log.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
