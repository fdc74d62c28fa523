// Light or dark: as the system says, until the reader chooses. Stored where the browser allows it.
const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  const root = document.documentElement;
  root.style.colorScheme = theme === "auto" ? "light dark" : theme;
  root.dataset.theme = theme;
  byId("theme").textContent = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[theme];
  try {
    localStorage.setItem("memopt-theme", theme);
  } catch {
    // Pages opened from disk may have no storage.
  }
}

function storedTheme() {
  try {
    const theme = localStorage.getItem("memopt-theme");
    return THEMES.includes(theme) ? theme : "auto";
  } catch {
    return "auto";
  }
}

function startTheme() {
  setTheme(storedTheme());
  byId("theme").addEventListener("click", () => {
    const now = THEMES.indexOf(document.documentElement.dataset.theme);
    setTheme(THEMES[(now + 1) % THEMES.length]);
  });
}
