"""Opening a job and what a training needs, as the settings say."""
