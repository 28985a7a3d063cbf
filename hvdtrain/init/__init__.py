"""`hvdtrain init`: a commented config to start from."""
