"""What touches a running job. Nothing here imports torch until it is used."""
