"""An axolotl plugin that trains on sequences split over ranks. Put its folder on PYTHONPATH, and into the YAML file:

```yaml
plugins:
  - axolotl_plugin.StarTrailPlugin
startrail_plan: u4/1x2  # default: auto
startrail_ranks: 8  # ranks per sequence, default: all
attn_implementation: sdpa  # or flash_attention_2: axolotl then packs by positions, which startrail reads
```
"""

from typing import Any

import torch.distributed as dist
from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch.distributed.device_mesh import init_device_mesh

import startrail
from startrail.integrations.trainer import StarTrailMixin


class StarTrailArgs(BaseModel):
    startrail_plan: str = "auto"
    startrail_ranks: int | None = None


class CountingTrainer(AxolotlTrainer):
    """axolotl looks for ``num_items_in_batch`` in the arguments of the decoder. It is the model that takes it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.model_accepts_loss_kwargs = True


class StarTrailPlugin(BasePlugin):
    def get_input_args(self) -> str:
        return f"{__name__}.StarTrailArgs"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """axolotl counts steps as if every rank had batches of its own. Loading remains axolotl's."""
        if not preprocess:
            cfg.batch_size //= cfg.startrail_ranks or cfg.world_size

    def get_trainer_cls(self, cfg: Any) -> type[AxolotlTrainer]:
        if (cfg.context_parallel_size or 1) > 1:
            raise ValueError(f"context_parallel_size={cfg.context_parallel_size}: leave it at 1 with startrail")

        class StarTrailTrainer(StarTrailMixin, CountingTrainer):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                config, args = options["model"].config.get_text_config(), options["args"]
                ranks = cfg.startrail_ranks or dist.get_world_size()
                shape = (dist.get_world_size() // ranks, ranks)
                mesh = init_device_mesh(args.device.type, shape, mesh_dim_names=("data", "sequence"))
                heads = dict(heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
                sp = startrail.SequenceParallel(cfg.startrail_plan, mesh=mesh["sequence"], **heads)
                args.average_tokens_across_devices = True  # axolotl turns it off; here, the loss is global
                super().__init__(*arguments, sp=sp, **options)

        return StarTrailTrainer
