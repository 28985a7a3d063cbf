"""HTML pages, pictures and model cards about trainings: `hvdtrain report` and `hvdtrain card`; and lines of the log about slow
ranks.
"""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    commands={
        "report": ("make an HTML page about one training or several", f"{__name__}.__main__"),
        "card": ("write a model card in the format of the Hugging Face Hub", f"{__name__}.card"),
    },
    reporters={"slow ranks": f"{__name__}.slow_ranks:open_slow_ranks"},
    artifacts={"report": f"{__name__}.page:write_page"},
)
