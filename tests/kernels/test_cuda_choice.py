"""Which backend a CUDA device gets, by dtype, head dim, compute capability and installed packages."""

import sys
import types

import pytest
import torch
from torch._subclasses import FakeTensorMode

from startrail import _compat
from startrail.kernels import cuda, kernel_for
from tests.kernels.stand_ins import HALF, PACKAGE, WithoutDeviceGuard


@pytest.fixture
def select(monkeypatch):
    """Select a backend as if flash-attn of some version were installed, on a device of some capability."""

    def chosen(
        dtype, head_dim=64, installed=None, capability=None, softcap=None, cudnn=None, attends=True, value_dim=None
    ):  # fmt: skip
        parent = None
        if installed is not None:
            parent = types.ModuleType("flash_attn")
            parent.__version__, parent.__path__ = installed, []
        monkeypatch.setitem(sys.modules, "flash_attn", parent)
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", parent and PACKAGE)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: cudnn is not None)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(_compat, "can_use_cudnn", lambda q, k, v, causal: attends and q.shape[3] % 8 == 0)
        cuda._installed_flash_attn.cache_clear()
        cuda._newer_flash.cache_clear()
        with FakeTensorMode(), WithoutDeviceGuard():
            kernel = kernel_for(torch.device("cuda"), dtype, head_dim, softcap, value_dim)
        assert kernel.softcap == softcap
        assert kernel.reason
        chosen.reason = kernel.reason
        return kernel.name

    yield chosen
    cuda._installed_flash_attn.cache_clear()
    cuda._newer_flash.cache_clear()


@pytest.mark.parametrize("installed", [None, "2.8.3"])
def test_selection_by_dtype_and_head_dim(select, installed):
    flash = "cuda-flash" if installed is None else "cuda-flash-attn"
    for dtype in HALF:
        assert select(dtype, 256, installed) == flash
        assert select(dtype, 20, installed) == flash
        assert select(dtype, 257, installed) == "cuda-efficient"
    assert select(torch.float32, 64, installed) == "cuda-efficient"
    assert select(torch.float64, 64, installed) == "reference"
    with pytest.raises(ValueError, match=r"torch\.int8"):
        select(torch.int8, 64, installed)


@pytest.mark.parametrize(
    "version, name",
    [("2.6.3", "cuda-flash"), ("2.7.0.post2", "cuda-flash-attn"), ("2.10", "cuda-flash-attn"), ("3.0", "cuda-flash")],
)
def test_other_signatures_of_flash_attn_fall_back_to_aten(select, version, name):
    assert select(torch.bfloat16, installed=version) == name


def test_newer_flash_attention_is_preferred_if_it_supports_the_gpu(select, monkeypatch):
    """The implementation that torch is set to use comes first, then FA3 and FA4; the reason is given."""
    made = cuda.FlashOps(None, None, None, None)
    installed = {"FA3"}
    found = lambda name, path: made if name in installed else None  # noqa: E731
    found.cache_clear = lambda: None
    monkeypatch.setattr(cuda, "_newer_flash", found)
    assert select(torch.bfloat16, installed="2.8.3", capability=(9, 0)) == "cuda-flash-fa3"
    assert select.reason == "FA3 is installed and supports (9, 0)"
    assert select(torch.bfloat16, installed="2.8.3", capability=(10, 0)) == "cuda-flash-attn"
    faster = "about 1.5x faster here: install flash-attn-4, or use cuDNN (which this torch lacks)"
    assert select.reason == f"flash-attn 2.8.3 is installed; {faster}"
    assert select(torch.bfloat16, installed="2.8.3", capability=(8, 0)) == "cuda-flash-attn"
    assert select.reason == "flash-attn 2.8.3 is installed"
    installed |= {"FA4"}
    assert select(torch.bfloat16, capability=(10, 0)) == "cuda-flash-fa4"
    assert select(torch.bfloat16, 128, capability=(10, 0)) == "cuda-flash-fa4"
    assert select(torch.bfloat16, 192, capability=(10, 0)) == "cuda-flash", "whose kernels are not for all of these"
    assert select(torch.bfloat16, 256, installed="2.8.3", capability=(10, 0)) == "cuda-flash-attn"
    assert select(torch.bfloat16, 192, capability=(9, 0)) == "cuda-flash-fa3"
    assert select(torch.bfloat16, 192, capability=(10, 0), value_dim=128) == "cuda-flash-fa4", "latent attention"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    assert select(torch.bfloat16, capability=(9, 0)) == "cuda-flash"
    assert select.reason == "torch is set to use FA4"
    assert select(torch.bfloat16, 192, capability=(9, 0)) == "cuda-efficient"
    assert select.reason == "head dim 192: FA4, which torch is set to use, is known to be right up to 128"
    assert select(torch.float32, capability=(9, 0)) == "cuda-efficient"


def test_cudnn_takes_the_widths_of_latent_attention(select):
    assert select(torch.bfloat16, 192, capability=(9, 0), cudnn=91002, value_dim=128) == "cuda-cudnn"
    assert select(torch.bfloat16, 192, capability=(9, 0), cudnn=91002) == "cuda-flash"
    assert select(torch.bfloat16, 192, capability=(9, 0), cudnn=91002, value_dim=128, attends=False) == "cuda-flash"


def test_deterministic_gradients_of_wide_heads_do_not_come_from_flash_attention_3(select, monkeypatch):
    """Its backward pass raises for them."""
    found = lambda name, path: cuda.FlashOps(None, None, None, None) if name == "FA3" else None  # noqa: E731
    found.cache_clear = lambda: None
    monkeypatch.setattr(cuda, "_newer_flash", found)
    for deterministic, wide in ((False, "cuda-flash-fa3"), (True, "cuda-flash-attn")):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda value=deterministic: value)
        assert select(torch.bfloat16, 256, installed="2.8.3", capability=(9, 0)) == wide
        assert select(torch.bfloat16, 192, installed="2.8.3", capability=(9, 0)) == "cuda-flash-fa3"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3", raising=False)
    assert select(torch.bfloat16, 256, capability=(9, 0)) == "cuda-efficient"


def test_torch_has_the_adapter_for_flash_attention_3():
    """Only its names: the packages are not installed here."""
    for name, path, _ in cuda._NEWER_PACKAGES:
        assert cuda._newer_flash(name, path) is None
    from torch.nn.attention import _fa3

    for op in ("scaled_dot_product_flash_attention", "flash_attention"):
        assert callable(getattr(_fa3, f"_fa3_{op}_forward_impl_default"))
        assert callable(getattr(_fa3, f"_fa3_{op}_backward_impl"))
    assert callable(_fa3._fa3_import_module)


def test_a_softcap_selects_flash_attn_or_raises_with_the_reason(select):
    assert select(torch.bfloat16, installed="2.8.3", capability=(9, 0), softcap=50.0) == "cuda-flash-attn"
    only = "softcap=50.0: of all GPU kernels only flash-attn supports it"
    assert select.reason == f"{only}; flash-attn 2.8.3 is installed"
    assert select(torch.float64, softcap=50.0) == "reference"
    only = r"softcap=50.0: of all GPU kernels only flash-attn >= 2.7 supports it, "
    for options, problem in [
        (dict(dtype=torch.bfloat16), r"and it is not installed \(pip install flash-attn, or load it first: kernels"),
        (dict(dtype=torch.bfloat16, installed="2.6.3"), "and it is not installed"),
        (dict(dtype=torch.float32, installed="2.8.3"), "but only in half precision, not float32"),
        (dict(dtype=torch.float16, installed="2.8.3", head_dim=264), "but only up to head dim 256, not 264"),
        (dict(dtype=torch.float16, installed="2.8.3", capability=(7, 5)), r"but only from compute capability \(8, 0\)"),
    ]:
        with pytest.raises(ValueError, match=only + problem):
            select(**options, softcap=50.0)


def kernels_package(*modules, repo="kernels-community/flash-attn2"):
    """The package ``kernels``, having loaded some kernels."""
    package, info = types.ModuleType("kernels"), repo and types.SimpleNamespace(repo_id=repo, revision="v4")
    loaded = [types.SimpleNamespace(module=module, repo_info=info) for module in modules]
    package.get_loaded_kernels = lambda: list(loaded)
    return package


def hub_kernel(name, **parts):
    module = types.ModuleType(name)
    vars(module).update(parts)
    return module


def test_flash_attn_that_the_program_has_loaded_from_the_kernels_hub(select, monkeypatch):
    later = hub_kernel("flash_attn3_1a", flash_attn_interface=types.SimpleNamespace(_flash_attn_forward=None))
    others = hub_kernel("activation_2b"), later
    monkeypatch.setitem(sys.modules, "kernels", types.ModuleType("kernels"))  # too old to say what it has loaded
    assert select(torch.bfloat16) == "cuda-flash"
    monkeypatch.setitem(sys.modules, "kernels", kernels_package(*others))
    assert select(torch.bfloat16) == "cuda-flash"
    ours = hub_kernel("flash_attn2_3c", flash_attn_interface=PACKAGE)
    hub = "kernels-community/flash-attn2"
    for repo, source in ((hub, f"{hub} (v4)"), (None, ours.__name__)):
        which = f"flash-attn is loaded from the kernels hub: {source}"
        monkeypatch.setitem(sys.modules, "kernels", kernels_package(*others, ours, repo=repo))
        assert select(torch.bfloat16, capability=(8, 0)) == "cuda-flash-attn"
        assert select.reason == which
        assert select(torch.bfloat16, softcap=50.0) == "cuda-flash-attn"
        assert select.reason.endswith(f"only flash-attn supports it; {which}")
    assert cuda.cuda_kernel(torch.device("cuda"), torch.bfloat16, 64).ops.forward is not _compat.cuda_flash_forward
    assert select(torch.bfloat16, installed="2.8.3") == "cuda-flash-attn"
    assert select.reason == "flash-attn 2.8.3 is installed"
    assert select(torch.bfloat16, installed="2.6.3") == "cuda-flash-attn"
    assert select.reason.startswith("flash-attn is loaded from the kernels hub")


def test_flash_needs_ampere(select):
    assert select(torch.float16, installed="2.8.3", capability=(7, 5)) == "cuda-efficient"
    assert select(torch.float16, installed="2.8.3", capability=(8, 0)) == "cuda-flash-attn"
    assert select(torch.float16, capability=(9, 0)) == "cuda-flash"


def test_hopper_and_newer_use_cudnn_where_no_newer_flash_attention_is_installed(select, monkeypatch):
    for capability in ((9, 0), (10, 0)):
        assert select(torch.bfloat16, 128, "2.8.3", capability, cudnn=91400) == "cuda-cudnn"
        assert select.reason == "cuDNN 91400: neither FlashAttention 3 nor 4 is installed"
    assert select(torch.bfloat16, 100, capability=(9, 0), cudnn=91400) == "cuda-cudnn", "padded to 104"
    assert select(torch.bfloat16, 128, capability=(9, 0), cudnn=8900, attends=False) == "cuda-flash"
    assert select.reason.endswith("or use cuDNN (whose version 8900 torch does not let attend here)")
    assert select(torch.bfloat16, 64, capability=(8, 0), cudnn=91400) == "cuda-flash"
    assert select(torch.float32, 64, capability=(9, 0), cudnn=91400) == "cuda-efficient"
    assert select(torch.bfloat16, 192, capability=(9, 0), cudnn=91400) == "cuda-flash"
    assert select.reason.endswith(
        "install flash_attn_3 or flash-attn-4, or use cuDNN (which supports head dims up to 128)"
    )
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert select(torch.bfloat16, 128, capability=(9, 0), cudnn=91400) == "cuda-flash"
    assert "which is disabled" in select.reason
