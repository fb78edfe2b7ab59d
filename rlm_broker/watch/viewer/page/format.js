// Numbers as people read them.

const whole = new Intl.NumberFormat("en");

function duration(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return "";
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const rounded = Math.round(seconds);
  if (rounded < 60) return `${rounded} s`;
  const minutes = Math.floor(rounded / 60);
  if (minutes < 60) return `${minutes} min ${rounded % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// A moment on a ruler whose marks are `step` seconds apart.
function moment(seconds, step) {
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (seconds < 59.9999) return step < 0.0999 ? `${(seconds * 1000).toFixed(Math.max(0, digits - 3))} ms` : `${seconds.toFixed(digits)} s`;
  const part = (seconds % 60).toFixed(digits);
  const rest = `${part.indexOf(".") === 1 || part.length === 1 ? "0" : ""}${part}`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes}:${rest}` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
}

function money(dollars) {
  if (dollars === null || dollars === undefined) return "cost unknown";
  if (dollars === 0) return "$0";
  return dollars < 0.01 ? `$${dollars.toFixed(4)}` : `$${dollars.toFixed(dollars < 1 ? 3 : 2)}`;
}

function amount(number) {
  if (number < 10000) return whole.format(number);
  if (number < 1e6) return `${(number / 1e3).toFixed(number < 1e5 ? 1 : 0)}k`;
  return `${(number / 1e6).toFixed(1)}M`;
}

function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  if (bytes < 1e6) return `${(bytes / 1e3).toFixed(bytes < 1e4 ? 1 : 0)} KB`;
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

const counted = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
const clock = (seconds) => new Date(seconds * 1000).toLocaleString();
const listed = (...parts) => parts.filter((part) => part).join(" · ");

// How a run ended, from the kind of its end: an error's kind alone does not say that the run failed.
const endWord = (kind) => (["answered", "stopped", "cancelled", "ended", "failed"].includes(kind) ? kind : `failed: ${kind}`);
