from meshwise.recording import plain_program as plain_program
