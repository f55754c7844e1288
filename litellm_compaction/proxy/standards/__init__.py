"""The protocols by which clients manage their context themselves."""
