"""``make dist``: installs the built wheel into an empty environment with torch alone, and tries the commands there.

python -m tests.release dist
"""

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

import startrail
from tests.helpers import ROOT

COMMANDS = [
    (["--help"], "Exact attention"),
    (["show", "u2/1x2"], "send"),
    (["plan", "--cluster", "a100-4x8", "--model", "gpt-7b", "--length", "512k"], "as fast as Ring Attention"),
    (["check", "u2/1x2", "--causal"], "ok: exact"),
    (["bench", "engine", "--length", "256", "--ranks", "2", "--plans", "1x2", "--rounds", "1"], "efficiency"),
    (["train", "gpt-tiny", "--steps", "2", "--ranks", "2", "--plan", "1x2", "--out", "run"], "held-out loss"),
]
CLONE_ONLY = [["bench"], ["bench", "memory", "--ranks", "2"], ["lab", "run", "--nodes", "2", "--", "program.py"]]
USER = """\
import torch
import startrail

def attend(q: torch.Tensor) -> torch.Tensor:
    with startrail.SequenceParallel("1x1") as sp:
        sequence = sp.sequence(q.shape[2])
        out, lse = sequence.attention(q, q, q, causal=True, return_lse=True)
        return out * lse.exp().unsqueeze(-1)

print(tuple(attend(torch.randn(1, 2, 5, 4)).shape))
"""


def main(folder: Path) -> None:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    expected = f"startrail-{startrail.__version__}"
    assert wheel.name.startswith(expected) and sdist.name.startswith(expected), (wheel, sdist)
    inside = zipfile.ZipFile(wheel).namelist()
    for name in ("py.typed", "planner/clusters/a100-4x8.toml", "planner/models/gpt-7b.toml", "view/assets/page.html"):
        assert f"startrail/{name}" in inside, f"{wheel.name} lacks {name}"
    for name in ("workshop/", "validation/", "tests/", "startrail/lab/"):
        assert not any(path.startswith(name) for path in inside), f"{wheel.name} has {name}"
    with tarfile.open(sdist) as packed:
        assert any(name.endswith("/pyproject.toml") for name in packed.getnames())
    with tempfile.TemporaryDirectory() as empty:
        venv.create(empty, with_pip=True)
        python = Path(empty, "bin", "python")

        def run(*arguments: object) -> subprocess.CompletedProcess[str]:
            return subprocess.run([str(a) for a in arguments], cwd=empty, capture_output=True, text=True)

        for install in (["-r", ROOT / "constraints.txt"], [wheel.resolve()]):
            done = run(python, "-m", "pip", "install", "--quiet", *install)
            assert done.returncode == 0, done.stderr
        for command, words in COMMANDS:
            done = run(python.with_name("startrail"), *command)
            assert done.returncode == 0 and words in done.stdout, (
                f"{command}: {done.stdout[-500:]}{done.stderr[-2000:]}"
            )
            assert "Warning" not in done.stderr, f"{command} warns: {done.stderr[:500]}"
            print(f"startrail {' '.join(command)}: ok")
        for command in CLONE_ONLY:
            done = run(python.with_name("startrail"), *command)
            assert done.returncode == 2 and done.stderr.count("\n") == 1 and "only from a clone" in done.stderr, done
            print(f"startrail {' '.join(command)}: says that it needs a clone")
        Path(empty, "user.py").write_text(USER)
        done = run(python, "user.py")
        assert "(1, 2, 5, 4)" in done.stdout, done.stderr
        done = run(sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "user.py")
        assert done.returncode == 0, done.stdout
        print("mypy --strict on a user's file: ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
