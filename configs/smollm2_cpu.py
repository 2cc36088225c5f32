"""The demo: SmolLM2-135M-Instruct on a CPU answers a question about two chapters of a novel.

`make model` fetches the model. Any flag overrides what stands here:
`triforce-generate --config=configs/smollm2_cpu.py --prompt="Who is Lady Russell?"`
"""

import pathlib

from ml_collections import config_dict

ROOT = pathlib.Path(__file__).resolve().parent.parent


def get_config() -> config_dict.ConfigDict:
    """Flags of triforce-generate."""
    config = config_dict.ConfigDict()
    config.target = str(ROOT / "models" / "smollm2-135m-instruct")
    config.draft = "ngram"
    config.dtype = "float32"
    config.max_length = 8192
    config.budget = 1024
    config.gamma = 6
    config.chat = True
    config.prompt_file = str(ROOT / "triforce_jax" / "data" / "persuasion.txt")
    config.prompt = ["What is the name of the house of Sir Walter Elliot?"]
    config.max_new_tokens = 64
    config.temperature = 0.0
    return config
