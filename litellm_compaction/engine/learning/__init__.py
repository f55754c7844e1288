"""What servers teach: how they count, and how they go on."""
