"""A server with the fake engine in a process of its own, as `fedpriv serve` starts it: the engine alone is replaced.

python -m tests.models.serving.child SECONDS ARGUMENTS-OF-FEDPRIV-SERVE
"""

import sys
import types

from tests.models.serving.fake import FakeServing


def main() -> None:
    """Serve."""
    seconds, *arguments = sys.argv[1:]
    module = types.ModuleType("fedpriv.models.serving.scheduler")
    module.open_serving = lambda source, **options: FakeServing(seconds=float(seconds))  # type: ignore[attr-defined]
    sys.modules["fedpriv.models.serving.scheduler"] = module
    from fedpriv.cli.main import main as fedpriv

    fedpriv(["serve", *arguments])


if __name__ == "__main__":
    main()
