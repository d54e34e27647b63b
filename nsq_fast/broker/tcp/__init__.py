"""nsqd's TCP protocol, V2: connections, commands, and what IDENTIFY and AUTH settle."""
