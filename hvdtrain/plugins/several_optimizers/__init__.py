"""Several optimizers in one training, each of some parameters, such as Muon of matrices and AdamW of the rest."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(learner_extensions={"several_optimizers": f"{__name__}.optimizers:with_several"})
