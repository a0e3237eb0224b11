"""The house rules: who may import whom, how large things may grow, and what one word may mean."""

import ast
import re
import subprocess
import sys
import warnings
from collections import defaultdict

import pytest

from tests.helpers import ROOT

SOURCE = ROOT / "src" / "startrail"

# Which packages a package may import from. Anything may import `_compat`. "api" is every module directly under
# src/startrail; what is not listed may import everything.
PLANS = {"schedule", "geometry", "compile"}
API = PLANS | {"agreement", "engine", "kernels", "planner", "planner.live", "transport"}
MAY_IMPORT = {
    "schedule": set(),
    "geometry": set(),
    "compile": {"schedule", "geometry"},
    "planner": PLANS,
    "view": PLANS | {"planner"},
    "kernels": {"geometry"},
    "agreement": set(),
    "transport": {"schedule", "kernels", "agreement"},
    "engine": PLANS | {"kernels", "agreement", "transport"},
    "planner.live": PLANS | {"planner", "kernels", "agreement", "transport"},
    "api": API,
    "launch": {"agreement"},
    "integrations": API | {"api"},
    "diagnostics": API | {"api", "launch", "integrations"},
    "training": API | {"api", "launch", "view"},
}
WITHOUT_TORCH = ["schedule", "geometry", "compile", "planner", "view", "cli"]
EVERYTHING = ["bench", "cli"]
FRONT_DOORS = {"testing": "diagnostics", "__main__": "cli"}  # modules of the api that only open another package

MAX_FUNCTION_LINES, MAX_TEST_LINES, MANY_LINES = 60, 100, 600

# File names that several packages use on purpose, and why.
SAME_NAMES = {
    "attention": "the two halves of one kind of call: what it compiles to, and what runs it",
    "halo": "the two halves of one kind of call",
    "base": "the interface of a package",
    "proof": "of programs, and of the compiled calls that they are parts of",
    "batch": "what layers of a batch share, and a Hugging Face batch",
    "latents": "what a kind of call compiles to, what runs it, and how models of transformers use it",
    "predict": "dense calls, and sparse ones",
    "recurrent": "layers of models, and what they cost",
    "reference": "a kernel, and a whole call",
    "scan": "the two halves of one kind of call",
    "tiles": "of a mask, and of an MLP",
}
# Files that bring others together, and so import more than 12.
ENTRANCES = {
    "cli.app",
    "integrations.transformers",
    "parallel",
}

# Class names that several modules use on purpose.
DELIBERATE = {"Piece": {"schedule.values", "training.checkpoints.contents"}}


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        yield ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"), path


def package_of(name: str) -> str:
    for package in sorted((*MAY_IMPORT, *EVERYTHING), key=len, reverse=True):
        if name == package or name.startswith(f"{package}."):
            return package
    return "_compat" if name == "_compat" else "api"


def imports_of(path) -> set[str]:
    """Modules of ours that are imported, also inside functions, but not those that only types need."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {name.removeprefix("startrail.") for name in names if name.startswith("startrail.")}
    existing = {name for name, _ in modules()}
    return {name for name in found if name in existing}


@pytest.mark.parametrize("package", [*MAY_IMPORT, *EVERYTHING])
def test_packages_import_only_what_they_may(package):
    allowed = MAY_IMPORT.get(package)
    own = [(name, path) for name, path in modules() if package_of(name) == package]
    assert own, f"{package} is not there any more: take it out of the dictionary"
    for name, path in own:
        found = {package_of(other) for other in imports_of(path)} - {package, "_compat"}
        if name in FRONT_DOORS:
            assert found == {FRONT_DOORS[name]}
        elif allowed is not None:
            assert found <= allowed, f"{name} imports {sorted(found - allowed)}; {package} may import {sorted(allowed)}"


def test_what_plans_proves_and_draws_imports_without_torch():
    named = [name for name, _ in modules() if package_of(name) in WITHOUT_TORCH and not name.endswith("__main__")]
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(f'startrail.{name}' for name in named)}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_show_runs_without_torch():
    code = "import sys; sys.modules['torch'] = None; from startrail.cli import main; sys.exit(main(['show', '2x2']))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "send q0>1 kv0>2" in done.stdout


def test_nothing_that_a_peer_or_a_file_sends_is_unpickled():
    """Except by ``launch.local``, from ranks that it forked itself. Object collectives pickle, and need numpy."""
    unsafe = r"_object\(|_object_list\(|^ *(import|from) \w*pickle|torch\.load\(|state_dict_loader|FileSystemReader"
    found = {name for name, path in modules() if re.search(unsafe, path.read_text(), re.MULTILINE)}
    assert found == {"launch.local"}


def private_torch_names(tree, compat_names) -> set[str]:
    """Private APIs of torch that a module uses: imports, attributes of what it imports from torch, and module names in
    strings. On other objects, such as process groups, only those that ``_compat`` uses as well are known."""

    def is_private(dotted):
        return re.search(r"(^|\.)_[a-zA-Z]", dotted)

    found, from_torch = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                if name.split(".")[0] == "torch":
                    from_torch.add(alias.asname or alias.name.split(".")[0])
                    found |= {name} if is_private(name) else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and str(node.value).startswith("torch."):
            found |= {node.value} if re.fullmatch(r"[\w.]+", node.value) and is_private(node.value) else set()
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            owner, _, rest = ast.unparse(node).partition(".")
            if owner in from_torch or (owner != "self" and node.attr in compat_names):
                found.add(f"{owner}.{rest}")
    return found


def test_only_compat_uses_private_apis_of_torch():
    trees = {name: ast.parse(path.read_text()) for name, path in modules()}
    compat_names = {node.attr for node in ast.walk(trees["_compat"]) if isinstance(node, ast.Attribute)}
    found = {name: private_torch_names(tree, compat_names) for name, tree in trees.items()}
    assert {"torch.distributed._functional_collectives", "group._start_coalescing"} <= found.pop("_compat")
    assert {name: uses for name, uses in found.items() if uses} == {}


def our_files():
    return [path for folder in ("src", "tests", "validation", "workshop") for path in (ROOT / folder).rglob("*.py")]


def lines_of_code(function) -> int:
    """Of the body, without the docstring, which may take the room that it needs."""
    first, *rest = function.body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and rest
    return function.end_lineno - (rest[0] if is_docstring else first).lineno + 1


def test_no_function_is_long():
    long = {}
    for path in our_files():
        most = MAX_TEST_LINES if ROOT / "tests" in path.parents else MAX_FUNCTION_LINES
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and lines_of_code(node) > most:
                long[f"{path.relative_to(ROOT)}: {node.name}"] = lines_of_code(node)
    assert long == {}


def test_long_files_are_noticed():
    for path in our_files():
        if (lines := len(path.read_text().splitlines())) > MANY_LINES:
            warnings.warn(f"{path.relative_to(ROOT)} has {lines} lines: is it still one idea?", stacklevel=1)


def test_no_file_imports_from_everywhere():
    many = {name for name, path in modules() if len(imports_of(path)) > 12}
    assert many == ENTRANCES


def test_a_file_name_means_one_thing():
    homes = defaultdict(set)
    for name, path in modules():
        if path.stem not in ("__init__", "__main__") and not name.startswith(
            "cli."
        ):  # commands have their subject's name
            homes[path.stem].add(name)
    twice = {stem: names for stem, names in homes.items() if len(names) > 1}
    assert {stem: names for stem, names in twice.items() if stem not in SAME_NAMES} == {}
    assert SAME_NAMES.keys() <= twice.keys(), "a name is no longer used twice"


def test_a_schedule_family_is_named_in_its_file_and_in_the_list_of_families_only():
    folder = SOURCE / "schedule" / "families"
    files = [path for path in folder.glob("*.py") if path.stem not in ("__init__", "base")]
    listed = ast.walk(ast.parse((folder / "__init__.py").read_text()))
    names = {node.id for node in listed if isinstance(node, ast.Name) and node.id.isupper()} - {"FAMILIES"}
    for path in files:
        names |= {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    assert {"Star", "STAR"} <= names
    homes = {f"schedule.families.{path.stem}" for path in files}
    for name, path in modules():
        if path.parent != folder:
            used = {getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(ast.parse(path.read_text()))}
            assert not used & names and not imports_of(path) & homes, f"{name} names a family"


def test_every_package_says_what_it_is_for():
    for folder in {path.parent for path in SOURCE.rglob("*.py")}:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert len(text.split()) >= 12, f"{folder.name}/__init__.py does not say what the package is for"
        assert "TODO" not in text, folder.name


def test_a_class_name_means_one_thing():
    homes = defaultdict(set)
    for name, path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].add(name)
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    assert twice == {name: places for name, places in DELIBERATE.items() if len(places) > 1}


def test_documentation_keeps_to_120_columns():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")]
    long = {
        f"{page.name}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 120
    }
    assert long == set()
