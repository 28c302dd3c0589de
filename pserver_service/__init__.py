"""What makes a process a parameter server. Its engine is shared/trireme_shared/serving, because trainers of
collective jobs serve blocks, too."""
