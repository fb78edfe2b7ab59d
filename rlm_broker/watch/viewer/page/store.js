// Texts: one stream of UTF-8 bytes, in compressed pieces. A text is [offset, bytes] and is unpacked when it is looked at.

const SLICE_ROWS_MS = 12;
const decoder = new TextDecoder();
const encoder = new TextEncoder();

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at += 1) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

function joined(parts) {
  if (parts.length === 1) return parts[0];
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let to = 0;
  for (const part of parts) {
    whole.set(part, to);
    to += part.length;
  }
  return whole;
}

async function through(bytes, stream) {
  const writer = stream.writable.getWriter();
  writer.write(bytes).catch(() => null); // what is wrong with the bytes is told by the reader
  writer.close().catch(() => null);
  const reader = stream.readable.getReader();
  const parts = [];
  for (let step = await reader.read(); !step.done; step = await reader.read()) parts.push(step.value);
  return joined(parts);
}

const unpack = (bytes) => through(bytes, new DecompressionStream("deflate-raw"));
const pause = () => new Promise((done) => setTimeout(done));

// All of a file's pieces are there when its document has been read; the first rows are there before.
const wholeDocument = new Promise((done) => {
  if (document.readyState !== "loading") done();
  else document.addEventListener("DOMContentLoaded", done, { once: true });
});

function makeStore(pieceBytes) {
  const MOST_CACHED = 6;
  const cached = new Map(); // number of a piece -> promise of its bytes
  const packed = []; // pieces of a live run: bytes, or compressed bytes
  let elements = null;
  let tail = new Uint8Array(0);
  let tailBytes = 0;
  let size = 0;

  async function load(at) {
    if (packed[at]) return packed[at].isPacked ? unpack(packed[at].bytes) : packed[at].bytes;
    if (elements === null) {
      await wholeDocument;
      elements = document.getElementsByClassName("texts-piece");
    }
    return unpack(bytesOf(elements[at].textContent));
  }

  function piece(at) {
    if (packed.length === at && tailBytes) return Promise.resolve(tail.subarray(0, tailBytes));
    const known = cached.get(at);
    cached.delete(at);
    const loading = known || load(at);
    cached.set(at, loading);
    if (cached.size > MOST_CACHED) cached.delete(cached.keys().next().value);
    return loading;
  }

  return {
    get size() { return size; },
    setSize(bytes) { size = bytes; },
    pieceBytes,
    // A piece that a search looks at once; it does not push others out.
    async passing(at) {
      if (packed.length === at && tailBytes) return tail.subarray(0, tailBytes);
      return cached.get(at) || load(at);
    },
    // The text of a part of [offset, bytes], without half characters at its ends.
    async text([offset, length], from = 0, most = Infinity) {
      const begin = offset + from;
      const end = offset + Math.min(length, from + most);
      const parts = [];
      for (let at = Math.floor(begin / pieceBytes); at * pieceBytes < end; at += 1) {
        const bytes = await piece(at);
        parts.push(bytes.subarray(Math.max(0, begin - at * pieceBytes), Math.min(bytes.length, end - at * pieceBytes)));
      }
      const bytes = joined(parts);
      let first = 0;
      while (from > 0 && first < 3 && (bytes[first] & 0xc0) === 0x80) first += 1;
      let last = bytes.length;
      if (from + most < length) {
        let start = last - 1; // of the last character, which may be cut
        while (start > last - 4 && start > first && (bytes[start] & 0xc0) === 0x80) start -= 1;
        if (bytes[start] >= 0xc0) last = start;
      }
      return decoder.decode(bytes.subarray(first, last));
    },
    add(text) {
      const bytes = encoder.encode(text);
      let from = 0;
      while (from < bytes.length) {
        if (tail.length < pieceBytes) tail = new Uint8Array(pieceBytes);
        const part = bytes.subarray(from, from + pieceBytes - tailBytes);
        tail.set(part, tailBytes);
        tailBytes += part.length;
        from += part.length;
        if (tailBytes === pieceBytes) {
          const kept = { bytes: tail, isPacked: false };
          packed.push(kept);
          through(tail, new CompressionStream("deflate-raw")).then((bytes) => Object.assign(kept, { bytes, isPacked: true }));
          tail = new Uint8Array(0);
          tailBytes = 0;
        }
      }
      size += bytes.length;
    },
  };
}

// Rows of a file, in slices of some milliseconds, so that no frame waits for all of them.
async function readRows(take, onSlice) {
  const elements = document.getElementsByClassName("rows-piece");
  let began = performance.now();
  for (let at = 0; at < elements.length; at += 1) {
    const rows = JSON.parse(decoder.decode(await unpack(bytesOf(elements[at].textContent))));
    for (const row of rows) {
      take(row);
      if (performance.now() - began > SLICE_ROWS_MS) {
        onSlice();
        await pause();
        began = performance.now();
      }
    }
    elements[at].textContent = "";
  }
}
