package rocks

const crashDirEnv = "KEELSTATE_ROCKS_CRASH_DIR"

func crashChild(string) {}
